# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import Batch, make_batch
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.questions import multi_image_exercise, number_exercise, scene_exercise
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.text.special_tokens import IM_END, THINK_END, THINK_START
from kimi_triton.text.tokenizer import KimiTokenizer

EXERCISES = [
    number_exercise(random.Random(1), "train"),
    multi_image_exercise(random.Random(2), "train"),
    scene_exercise(random.Random(3)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_model_files(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> KimiTokenizer:
    return KimiTokenizer.from_checkpoint(folder, CheckpointConfig.from_checkpoint(folder))


@pytest.fixture(scope="module")
def batch(tokenizer: KimiTokenizer, folder: Path) -> Batch:
    settings = ImageSettings.from_checkpoint(folder, "kimi_k25")
    return make_batch(EXERCISES, [False, True, False], tokenizer, settings)


def test_answers_are_what_is_learned(batch: Batch, tokenizer: KimiTokenizer) -> None:
    end, close = tokenizer.special(IM_END), tokenizer.special(THINK_END)
    answers = batch.answer_ids.split(batch.answer_lengths)
    for exercise, answer in zip(EXERCISES, answers, strict=True):
        assert answer[-1] == end
        text = [int(token) for token in answer[:-1] if token != close]
        assert tokenizer.decode_bytes(text).decode() == exercise.answer
    assert [int(answer[0]) == close for answer in answers] == [False, True, False]


def test_each_row_predicts_the_token_after_it(batch: Batch, tokenizer: KimiTokenizer) -> None:
    end = tokenizer.special(IM_END)
    following = batch.input_ids.roll(-1)[batch.answer_rows]
    inside = batch.answer_ids != end
    assert torch.equal(following[inside], batch.answer_ids[inside])
    first_rows = batch.answer_rows[torch.tensor([0, *batch.answer_lengths[:-1]]).cumsum(0)]
    endings = [THINK_END, THINK_START, THINK_END]
    assert batch.input_ids[first_rows].tolist() == [tokenizer.special(name) for name in endings]


def test_every_exercise_weighs_the_same(batch: Batch) -> None:
    weights = [float(own.sum()) for own in batch.answer_weights.split(batch.answer_lengths)]
    assert weights == pytest.approx([1 / len(EXERCISES)] * len(EXERCISES))


def test_image_tokens_and_patches_match(batch: Batch) -> None:
    views = batch.views
    patches = sum(h * w for _, h, w in views.grids)
    assert len(views.pixel_values) == len(views.labels) == patches
    assert int(batch.image_rows.sum()) * 4 == patches
    assert sum(batch.lengths) == len(batch.input_ids)
