# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError, InvalidRequest
from kimi_triton.vision.encoder import LocalEncoder
from kimi_triton.vision.grids import Grid, num_image_tokens, num_patches
from kimi_triton.vision.load import load_vision_model
from kimi_triton.vision.moonvit import VisionModel

CPU = torch.device("cpu")
GRIDS: list[Grid] = [(1, 16, 16), (1, 2, 2), (4, 4, 6), (1, 6, 10), (1, 2, 2)]
Pixels = Callable[..., Tensor]


def split(pixel_values: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    return list(torch.split(pixel_values, [num_patches(grid) for grid in grids]))


def rows(results: list[Tensor | InvalidRequest]) -> list[Tensor]:
    assert all(isinstance(result, Tensor) for result in results)
    return [result for result in results if isinstance(result, Tensor)]


@pytest.mark.parametrize("max_patches", [1, 100, 300, 16_384])
def test_results_do_not_depend_on_the_size_of_a_forward(
    max_patches: int, k25_model: VisionModel, pixels: Pixels
) -> None:
    images = split(pixels(GRIDS), GRIDS)
    results = rows(LocalEncoder(k25_model, CPU, max_patches).encode(images, GRIDS))
    assert [len(result) for result in results] == [num_image_tokens(grid) for grid in GRIDS]
    for image, grid, result in zip(images, GRIDS, results, strict=True):
        assert torch.allclose(result, k25_model(image, [grid]), rtol=0, atol=1e-5)


def test_d2_no_forward_is_above_the_budget(
    k25_model: VisionModel, pixels: Pixels, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[Grid] = [(1, 4, 4)] * 20 + [(1, 12, 12), (1, 4, 4)]
    forwards: list[int] = []
    plain_forward = VisionModel.forward

    def counted(model: VisionModel, pixel_values: Tensor, part: Sequence[Grid]) -> Tensor:
        forwards.append(len(pixel_values))
        return plain_forward(model, pixel_values, part)

    monkeypatch.setattr(VisionModel, "forward", counted)
    LocalEncoder(k25_model, CPU, 100).encode(split(pixels(grids), grids), grids)
    assert forwards == [96, 96, 96, 32, 144, 16]


def test_no_images_never_touch_the_model(k25_model: VisionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(VisionModel, "forward")
    assert LocalEncoder(k25_model, CPU).encode([], []) == []


def test_results_carry_no_graph(k25_model: VisionModel, pixels: Pixels) -> None:
    grids: list[Grid] = [(1, 4, 4)]
    (result,) = rows(LocalEncoder(k25_model, CPU).encode([pixels(grids)], grids))
    assert not result.requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_d1_an_embedding_that_is_not_finite_fails_its_image_alone(
    value: float, k25_checkpoint: Checkpoint, pixels: Pixels
) -> None:
    model = load_vision_model(k25_checkpoint, CPU, torch.float32)
    model.vision_tower.patch_embed.pos_emb.weight[0, 0] = value  # seen by grids as large as the table, (16, 16)
    grids: list[Grid] = [(1, 2, 2), (1, 16, 16), (1, 2, 2)]
    good, bad, other = LocalEncoder(model, CPU).encode(split(pixels(grids), grids), grids)
    assert isinstance(good, Tensor)
    assert isinstance(other, Tensor)
    assert isinstance(bad, InvalidRequest)
    assert str(bad) == "the vision encoder gave values that are not finite in 64 rows"


@pytest.mark.parametrize("max_patches", [0, -5, 2**31])
def test_impossible_budgets_are_refused(max_patches: int, k25_model: VisionModel) -> None:
    with pytest.raises(ConfigError, match=f"max_patches_per_forward is {max_patches}, expected 1 to "):
        LocalEncoder(k25_model, CPU, max_patches)
