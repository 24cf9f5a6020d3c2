# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint as our model and as transformers' model, and raw pixels for any grids."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Kimi_K25ForConditionalGeneration

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.load import load_vision_model
from kimi_triton.vision.moonvit import VisionModel

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def k25_checkpoint(tiny_k25: Path) -> Checkpoint:
    return Checkpoint(tiny_k25)


@pytest.fixture(scope="session")
def vl_checkpoint(tiny_vl: Path) -> Checkpoint:
    return Checkpoint(tiny_vl)


@pytest.fixture(scope="session")
def k25_model(k25_checkpoint: Checkpoint) -> VisionModel:
    return load_vision_model(k25_checkpoint, CPU, torch.float32)


@pytest.fixture(scope="session")
def vl_model(vl_checkpoint: Checkpoint) -> VisionModel:
    return load_vision_model(vl_checkpoint, CPU, torch.float32)


@pytest.fixture(scope="session")
def pixels() -> Callable[..., Tensor]:
    """pixels(grids, seed=0): random pixel_values, (num_patches, 3, 14, 14) uint8."""

    def make(grids: Sequence[Grid], seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = sum(map(num_patches, grids))
        return torch.randint(0, 256, (rows, 3, 14, 14), generator=generator, dtype=torch.uint8)

    return make


@pytest.fixture(scope="session")
def reference(tiny_k25: Path) -> Callable[..., nn.Module]:
    """reference(dtype, attention): transformers' whole K2.5 model, which converts the released layout by itself."""

    def load(dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = Kimi_K25ForConditionalGeneration.from_pretrained(
                tiny_k25, dtype=dtype, attn_implementation=attention
            )
        whole: nn.Module = model.model
        return whole.eval().requires_grad_(False)

    return load


@pytest.fixture(scope="session")
def reference_embeds() -> Callable[..., Tensor]:
    """reference_embeds(model, pixel_values, grids): (num_image_tokens, text_hidden_size) from raw pixels."""

    def embed(model: nn.Module, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        dtype = next(model.parameters()).dtype
        normalised = ((pixel_values / 255 - 0.5) / 0.5).to(dtype)
        images = model.get_image_features(normalised, torch.tensor(grids)).pooler_output  # type: ignore[operator]
        return torch.cat(images)

    return embed
