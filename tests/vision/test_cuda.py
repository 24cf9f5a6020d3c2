# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show. `pytest -m gpu tests/vision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.vision.attention import Attention, Sequences, flash_attention, sdpa_attention, varlen_attention
from kimi_triton.vision.encoder import LocalEncoder
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.load import load_vision_model
from kimi_triton.vision.moonvit import VisionModel

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
GRIDS: list[Grid] = [(1, 36, 46), (1, 2, 2), (4, 8, 8), (1, 64, 64)]
Pixels = Callable[..., Tensor]


def installed_bodies() -> list[Callable[[], Attention]]:
    names = {"flash_attn": flash_attention, "torch.nn.attention.varlen": varlen_attention}
    return [body for name, body in names.items() if find_spec(name) is not None]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait of the host for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("body", installed_bodies())
def test_varlen_kernels_equal_sdpa(body: Callable[[], Attention]) -> None:
    sequences = Sequences.from_grids(GRIDS, CUDA)
    packed = torch.randn(sum(sequences.lengths), 3, 4, 72, device=CUDA).bfloat16()
    query, key, value = packed.unbind(1)
    exact = sdpa_attention(query.float(), key.float(), value.float(), sequences)
    attended = body()(query, key, value, sequences)
    assert torch.allclose(attended.float(), exact, rtol=2**-7, atol=2**-7)


def test_fp32_on_the_gpu_equals_the_cpu(k25_model: VisionModel, k25_checkpoint: Checkpoint, pixels: Pixels) -> None:
    model = load_vision_model(k25_checkpoint, CUDA, torch.float32)
    pixel_values = pixels(GRIDS)
    image_embeds = model(pixel_values.to(CUDA), GRIDS)
    assert torch.allclose(image_embeds.cpu(), k25_model(pixel_values, GRIDS), rtol=0, atol=1e-4)


def test_d5_a_forward_never_waits_for_the_device(k25_checkpoint: Checkpoint, pixels: Pixels) -> None:
    model = load_vision_model(k25_checkpoint, CUDA, torch.bfloat16)
    for grids in (GRIDS, GRIDS[1:2], GRIDS[::-1]):
        pixel_values = pixels(grids).to(CUDA)
        with torch.inference_mode(), no_waiting():
            model(pixel_values, grids)


def test_images_from_the_cpu_become_rows_on_the_gpu(
    k25_model: VisionModel, k25_checkpoint: Checkpoint, pixels: Pixels
) -> None:
    model = load_vision_model(k25_checkpoint, CUDA, torch.float32)
    images = list(torch.split(pixels(GRIDS), [num_patches(grid) for grid in GRIDS]))
    for rows, image, grid in zip(LocalEncoder(model, CUDA, 2000).encode(images, GRIDS), images, GRIDS, strict=True):
        assert isinstance(rows, Tensor)
        assert rows.device == CUDA
        assert torch.allclose(rows.cpu(), k25_model(image, [grid]), rtol=0, atol=1e-4)


def test_d1_high_contrast_stays_finite(k25_checkpoint: Checkpoint) -> None:
    model = load_vision_model(k25_checkpoint, CUDA, torch.bfloat16)
    checkerboard = (torch.arange(14)[:, None] + torch.arange(14)) % 2 * 255
    pixel_values = checkerboard.to(CUDA, torch.uint8).expand(128 * 128, 3, 14, 14)
    assert model(pixel_values, [(1, 128, 128)]).isfinite().all()


def test_d2_peak_memory_is_linear_in_the_number_of_images(k25_checkpoint: Checkpoint, pixels: Pixels) -> None:
    model = load_vision_model(k25_checkpoint, CUDA, torch.float32)  # fp32: without a varlen kernel
    peaks = []
    for count in (8, 64):
        grids: list[Grid] = [(1, 32, 32)] * count
        pixel_values = pixels(grids).to(CUDA)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.inference_mode():
            model(pixel_values, grids)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 9 * peaks[0]
