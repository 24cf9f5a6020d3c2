# SPDX-License-Identifier: Apache-2.0
"""From patches to the language model: average the frames, merge 2 x 2 patches, project."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kimi_triton.config import MERGE_KERNEL_SIZE, VisionConfig
from kimi_triton.vision.grids import Grid, num_image_tokens, num_patches


def merge_patches(hidden_states: Tensor, grids: Sequence[Grid]) -> Tensor:
    """(num_patches, hidden_size) -> (num_image_tokens, 4, hidden_size).

    The four patches of a token are in raster order within their cell: top left, top right, bottom left, bottom right.
    Frames are averaged.
    """
    kh, kw = MERGE_KERNEL_SIZE
    tokens = [num_image_tokens(grid) for grid in grids]
    merged = hidden_states.new_empty(sum(tokens), kh * kw, hidden_states.shape[-1])
    images = torch.split(hidden_states, [num_patches(grid) for grid in grids])
    for image, cells, (t, h, w) in zip(images, torch.split(merged, tokens), grids, strict=True):
        frames = image.view(t, h // kh, kh, w // kw, kw, -1)
        pooled = frames[0] if t == 1 else frames.mean(0)  # torch sums bf16 in fp32
        cells.view(h // kh, w // kw, kh, kw, -1).copy_(pooled.transpose(1, 2))
    return merged


class Projector(nn.Module):
    """LayerNorm on each patch, then an MLP with exact (erf) GELU over the four patches of a token.

    K2.5 stores linear_1 and linear_2 as proj.0 and proj.2.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        merged_size = config.hidden_size * MERGE_KERNEL_SIZE[0] * MERGE_KERNEL_SIZE[1]
        self.pre_norm = nn.LayerNorm(config.hidden_size, eps=config.projector_ln_eps)
        self.linear_1 = nn.Linear(merged_size, merged_size)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(merged_size, config.text_hidden_size)

    def forward(self, merged: Tensor) -> Tensor:
        """(num_image_tokens, 4, hidden_size) -> (num_image_tokens, text_hidden_size)."""
        hidden_states: Tensor = self.pre_norm(merged).flatten(1)
        hidden_states = self.act(self.linear_1(hidden_states))
        image_embeds: Tensor = self.linear_2(hidden_states)
        return image_embeds
