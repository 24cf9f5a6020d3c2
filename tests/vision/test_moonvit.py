# SPDX-License-Identifier: Apache-2.0
"""The whole tower and projector: against transformers, against itself in other packs, and what one forward costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.vision.attention import Sequences
from kimi_triton.vision.grids import Grid, num_image_tokens, num_patches
from kimi_triton.vision.load import load_vision_model
from kimi_triton.vision.moonvit import VisionModel

CPU = torch.device("cpu")
MIXED: list[Grid] = [(1, 2, 2), (1, 36, 46), (1, 16, 16), (1, 6, 2), (1, 2, 144)]
Pixels = Callable[..., Tensor]


def separate(model: nn.Module, pixel_values: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """image_embeds of each image from a forward of its own."""
    images = torch.split(pixel_values, [num_patches(grid) for grid in grids])
    return [model(image, [grid]) for image, grid in zip(images, grids, strict=True)]


@pytest.mark.parametrize("grids", [MIXED, [(1, 4, 6)], [(4, 4, 8), (4, 2, 6)], [(2, 16, 16)]])
def test_k25_equals_transformers(
    grids: list[Grid],
    k25_model: VisionModel,
    reference: Callable[..., nn.Module],
    reference_embeds: Callable[..., Tensor],
    pixels: Pixels,
) -> None:
    pixel_values = pixels(grids)
    expected = reference_embeds(reference(torch.float32), pixel_values, grids)
    image_embeds = k25_model(pixel_values, grids)
    assert image_embeds.shape == (sum(map(num_image_tokens, grids)), k25_model.config.text_hidden_size)
    assert torch.allclose(image_embeds, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("grids", [MIXED, [(4, 8, 8)]])
def test_bf16_error_is_no_larger_than_that_of_transformers_eager_path(
    grids: list[Grid],
    k25_checkpoint: Checkpoint,
    reference: Callable[..., nn.Module],
    reference_embeds: Callable[..., Tensor],
    pixels: Pixels,
) -> None:
    pixel_values = pixels(grids)
    exact = reference_embeds(reference(torch.float32, "eager"), pixel_values, grids)
    eager = reference_embeds(reference(torch.bfloat16, "eager"), pixel_values, grids)
    ours = load_vision_model(k25_checkpoint, CPU, torch.bfloat16)(pixel_values, grids)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).square().mean() <= (eager - exact).square().mean()


def test_d1_high_contrast_stays_finite_in_bf16(k25_checkpoint: Checkpoint) -> None:
    model = load_vision_model(k25_checkpoint, CPU, torch.bfloat16)
    checkerboard = (torch.arange(14)[:, None] + torch.arange(14)) % 2 * 255
    pixel_values = checkerboard.to(torch.uint8).expand(64 * 64, 3, 14, 14)
    assert model(pixel_values, [(1, 64, 64)]).isfinite().all()


def test_the_kimi_vl_tower_is_the_k25_tower_with_one_frame(
    k25_model: VisionModel, vl_checkpoint: Checkpoint, pixels: Pixels
) -> None:
    vl_model = VisionModel(vl_checkpoint.config.vision)
    vl_model.vision_tower.load_state_dict(k25_model.vision_tower.state_dict())
    pixel_values = pixels(MIXED)
    assert torch.equal(vl_model.vision_tower(pixel_values, MIXED), k25_model.vision_tower(pixel_values, MIXED))


def test_packed_images_equal_separate_ones(k25_model: VisionModel, pixels: Pixels) -> None:
    grids: list[Grid] = [*MIXED, (4, 4, 8)]
    pixel_values = pixels(grids)
    packed = k25_model(pixel_values, grids)
    assert torch.allclose(packed, torch.cat(separate(k25_model, pixel_values, grids)), rtol=0, atol=1e-5)


def test_changing_one_image_changes_no_row_of_another(k25_model: VisionModel, pixels: Pixels) -> None:
    pixel_values = pixels(MIXED)
    tokens = [num_image_tokens(grid) for grid in MIXED]
    before = torch.split(k25_model(pixel_values, MIXED), tokens)
    patches = [num_patches(grid) for grid in MIXED]
    torch.split(pixel_values, patches)[2].random_(0, 256, generator=torch.Generator().manual_seed(1))
    after = torch.split(k25_model(pixel_values, MIXED), tokens)
    unchanged = [torch.equal(left, right) for left, right in zip(before, after, strict=True)]
    assert unchanged == [True, True, False, True, True]


def test_c7_rows_follow_the_order_of_the_images(k25_model: VisionModel, pixels: Pixels) -> None:
    a, b, c = (1, 16, 16), (1, 60, 50), (1, 2, 2)
    images = {grid: pixels([grid], seed) for seed, grid in enumerate((a, b, c))}
    alone = {grid: k25_model(image, [grid]) for grid, image in images.items()}
    for order in ((a, b, c), (c, a, b)):
        packed = k25_model(torch.cat([images[grid] for grid in order]), order)
        rows = torch.split(packed, [num_image_tokens(grid) for grid in order])
        for grid, image_rows in zip(order, rows, strict=True):
            assert torch.allclose(image_rows, alone[grid], rtol=0, atol=1e-5)


def test_d4_a_mark_in_a_corner_is_not_mirrored(k25_model: VisionModel) -> None:
    image = torch.zeros(6, 6, 3, 14, 14, dtype=torch.uint8)
    image[0, 5] = 255
    transposed = image.transpose(0, 1)
    grid: list[Grid] = [(1, 6, 6)]
    straight, mirrored = (k25_model(part.flatten(0, 1), grid).view(3, 3, -1) for part in (image, transposed))
    assert not torch.allclose(straight.transpose(0, 1), mirrored, atol=1e-2)


@pytest.mark.parametrize("sides", [(2, 2), (2, 4), (36, 46), (58, 30), (2, 80), (144, 2), (2, 512), (512, 2)])
def test_b4_rows_equal_the_count_from_the_grid(sides: tuple[int, int], vl_model: VisionModel, pixels: Pixels) -> None:
    grid = (1, *sides)
    assert len(vl_model(pixels([grid]), [grid])) == num_image_tokens(grid)


def test_heads_are_counted_from_the_weights(k25_model: VisionModel) -> None:
    block = k25_model.vision_tower.encoder.blocks[0]
    head_dim = block.head_dim
    hidden_states = torch.randn(6, k25_model.config.hidden_size)
    freqs_cis = k25_model.vision_tower.encoder.rope.freqs_cis([(1, 2, 3)], CPU)

    def attended(block: Any, heads: slice) -> Tensor:
        """The block's attention with only some of its heads, as a tensor-parallel worker has them."""
        rows = block.wqkv.weight.view(3, -1, head_dim, hidden_states.shape[1])[:, heads].flatten(0, 2)
        bias = block.wqkv.bias.view(3, -1, head_dim)[:, heads].flatten()
        columns = block.wo.weight.view(hidden_states.shape[1], -1, head_dim)[:, heads].flatten(1)
        shard = type(block)(k25_model.config, block.attention).requires_grad_(False)
        shard.wqkv, shard.wo = nn.Linear(*rows.shape[::-1]), nn.Linear(*columns.shape[::-1], bias=False)
        shard.load_state_dict({"wqkv.weight": rows, "wqkv.bias": bias, "wo.weight": columns}, strict=False)
        result: Tensor = shard.requires_grad_(False).attend(hidden_states, freqs_cis, sequences)
        return result

    sequences = Sequences.from_grids([(1, 2, 3)], CPU)
    whole = block.attend(hidden_states, freqs_cis, sequences)
    halves = attended(block, slice(0, 2)) + attended(block, slice(2, 4)) + block.wo.bias
    assert torch.allclose(whole, halves, atol=1e-5)


class Recorder(TorchDispatchMode):
    """Counts the operators of a forward and remembers its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.largest_bytes = max(self.largest_bytes, tensor.nbytes)
        return result


def recorded(model: VisionModel, pixel_values: Tensor, grids: Sequence[Grid]) -> Recorder:
    with torch.inference_mode(), Recorder() as recorder:
        model(pixel_values, grids)
    return recorder


def test_d2_memory_is_linear_in_the_number_of_images(k25_model: VisionModel, pixels: Pixels) -> None:
    few, many = [(1, 32, 32)] * 2, [(1, 32, 32)] * 64
    small, large = (recorded(k25_model, pixels(grids), grids).largest_bytes for grids in (few, many))
    assert large == 32 * small
    assert large < (64 * 1024) ** 2 / 8  # far below one bit for each pair of patches


def test_d5_a_forward_reads_no_value_back_from_the_device(k25_model: VisionModel, pixels: Pixels) -> None:
    grids = [(1, 4, 4)] * 16
    for batch in (grids, grids[:2], grids):
        calls = recorded(k25_model, pixels(batch), batch).calls
        assert calls["scaled_dot_product_attention"] + calls["_scaled_dot_product_flash_attention_for_cpu"] > 0
        assert calls["_local_scalar_dense"] == calls["nonzero"] == calls["is_nonzero"] == 0


def test_constructed_models_load_a_state_dict(k25_model: VisionModel, pixels: Pixels) -> None:
    copy = VisionModel(k25_model.config)
    copy.load_state_dict(k25_model.state_dict())
    assert torch.equal(copy(pixels(MIXED), MIXED), k25_model(pixels(MIXED), MIXED))
