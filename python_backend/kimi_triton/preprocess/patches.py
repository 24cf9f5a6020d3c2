# SPDX-License-Identifier: Apache-2.0
"""From an RGB picture to the patches MoonViT reads."""

from __future__ import annotations

from kimi_triton.config import MERGE_KERNEL_SIZE

Grid = tuple[int, int, int]  # (t, h, w) in patches, before merging


def num_image_tokens(grid: Grid) -> int:
    """Tokens of one media item: h·w/4, whatever t is, because the frames of a chunk are averaged.

    The only place where tokens are counted; placeholders and rows of image_embeds both follow it.
    """
    _, height, width = grid
    return height * width // (MERGE_KERNEL_SIZE[0] * MERGE_KERNEL_SIZE[1])
