# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.vision.merger import Projector, merge_patches


def test_the_four_patches_of_a_token_are_in_raster_order() -> None:
    h, w = 4, 6
    patch_index = torch.arange(h * w, dtype=torch.float32)[:, None]
    merged = merge_patches(patch_index, [(1, h, w)])[..., 0]
    assert merged.shape == (6, 4)
    assert merged[0].tolist() == [0, 1, w, w + 1]
    assert merged[1].tolist() == [2, 3, w + 2, w + 3]
    assert merged[3].tolist() == [2 * w, 2 * w + 1, 3 * w, 3 * w + 1]


def test_frames_are_averaged_position_by_position() -> None:
    hidden_states = torch.randn(3, 4 * 6, 5)
    merged = merge_patches(hidden_states.flatten(0, 1), [(3, 4, 6)])
    assert torch.allclose(merged, merge_patches(hidden_states.mean(0), [(1, 4, 6)]), atol=1e-6)


def test_frames_are_averaged_in_fp32() -> None:
    frames = torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16()  # 256 + 1 is 256 in bf16
    hidden_states = frames[:, None].expand(4, 4).reshape(16, 1)
    assert merge_patches(hidden_states, [(4, 2, 2)]).flatten()[0] == torch.tensor(259 / 4).bfloat16()


def test_a_pack_is_its_images_one_after_another() -> None:
    grids = [(1, 2, 8), (2, 4, 2), (1, 6, 4)]
    images = [torch.randn(t * h * w, 3) for t, h, w in grids]
    packed = merge_patches(torch.cat(images), grids)
    separate = [merge_patches(image, [grid]) for image, grid in zip(images, grids, strict=True)]
    assert torch.equal(packed, torch.cat(separate))


def test_d2_offsets_beyond_two_to_the_31_elements() -> None:
    grids = [(1, 512, 512)] * 8
    hidden_states = torch.empty(8 * 512 * 512, 1152, device="meta")
    assert hidden_states.numel() > 2**31
    assert merge_patches(hidden_states, grids).shape == (8 * 256 * 256, 4, 1152)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_the_projector_is_layer_norm_and_two_layers_with_exact_gelu(vl_checkpoint: Checkpoint, eps: float) -> None:
    projector = Projector(replace(vl_checkpoint.config.vision, projector_ln_eps=eps)).requires_grad_(False).double()
    merged = 3 * torch.randn(5, 4, projector.pre_norm.normalized_shape[0], dtype=torch.float64)
    variance = merged.var(-1, unbiased=False, keepdim=True)
    normalised = (merged - merged.mean(-1, keepdim=True)) / (variance + eps).sqrt()
    normalised = normalised * projector.pre_norm.weight + projector.pre_norm.bias
    inner = normalised.reshape(5, -1) @ projector.linear_1.weight.T + projector.linear_1.bias
    gelu = torch.tensor([[x * 0.5 * math.erfc(-x / math.sqrt(2)) for x in row] for row in inner.tolist()])
    expected = gelu.double() @ projector.linear_2.weight.T + projector.linear_2.bias
    assert torch.allclose(projector(merged), expected, atol=1e-6)
