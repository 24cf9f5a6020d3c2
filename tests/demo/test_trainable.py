# SPDX-License-Identifier: Apache-2.0
"""The maths of training against transformers' own classes, on seeded weights that went through a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import Kimi_K25ForConditionalGeneration

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import Batch, make_batch
from kimi_triton.demo.learning import answer_logits
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.questions import multi_image_exercise, number_exercise, scene_exercise
from kimi_triton.demo.tiny import random_weights
from kimi_triton.demo.train import write_weights
from kimi_triton.demo.trainable import Groups, Weights, attend
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.text.tokenizer import KimiTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untrained")
    write_model_files(folder)
    write_weights(folder, random_weights(CheckpointConfig.from_checkpoint(folder), seed=3))
    return folder


@pytest.fixture(scope="module")
def batch(folder: Path) -> Batch:
    rng = random.Random(1)
    exercises = [number_exercise(rng, "train"), multi_image_exercise(rng, "train"), scene_exercise(rng)]
    tokenizer = KimiTokenizer.from_checkpoint(folder, CheckpointConfig.from_checkpoint(folder))
    return make_batch(exercises, [False, True, False], tokenizer, ImageSettings.from_checkpoint(folder, "kimi_k25"))


def test_logits_are_those_of_transformers(folder: Path, batch: Batch) -> None:
    config = CheckpointConfig.from_checkpoint(folder)
    weights: Weights = {name: w.float() for name, w in random_weights(config, seed=3).items()}
    model = Kimi_K25ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ours = answer_logits(weights, config, batch)
        theirs, first_patch, first_image = [], 0, 0
        for input_ids in batch.input_ids.split(batch.lengths):
            is_pad = input_ids == config.media_placeholder_token_id
            num_images = int((is_pad[1:] & ~is_pad[:-1]).sum())
            grids = batch.views.grids[first_image : first_image + num_images]
            num_patches = sum(h * w for _, h, w in grids)
            pixels = batch.views.pixel_values[first_patch : first_patch + num_patches].float() / 127.5 - 1
            theirs.append(model(input_ids[None], pixel_values=pixels, image_grid_thw=torch.tensor(grids)).logits[0])
            first_patch, first_image = first_patch + num_patches, first_image + num_images
    expected = torch.cat(theirs)[batch.answer_rows]
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("causal", [False, True])
def test_a_pack_is_attended_as_its_sequences_are_alone(causal: bool) -> None:
    torch.manual_seed(0)
    lengths = [3, 9, 1, 8]
    q, k, v = (torch.randn(24, 2, 4) for _ in range(3))  # three rows more than the sequences have
    packed = attend(q, k, v, Groups.of(lengths, 24, 2, causal))
    assert bool(packed.isfinite().all())
    alone = [
        torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=causal)
        .transpose(0, 1)
        .flatten(1)
        for part in zip(*(x[:21].split(lengths) for x in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(packed[:21], torch.cat(alone))
