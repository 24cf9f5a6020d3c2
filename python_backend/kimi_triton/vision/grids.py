# SPDX-License-Identifier: Apache-2.0
"""How many rows of pixel_values and of image_embeds a grid stands for, and what a grid may be."""

from __future__ import annotations

from collections.abc import Sequence

from kimi_triton.config import MERGE_KERNEL_SIZE, VisionConfig
from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.patches import Grid, num_image_tokens
from kimi_triton.preprocess.settings import POSITIONS_PER_SIDE

__all__ = ["Grid", "check_grids", "num_image_tokens", "num_patches"]


def num_patches(grid: Grid) -> int:
    """Rows of pixel_values that belong to one image or video chunk."""
    t, h, w = grid
    return t * h * w


def check_grids(grids: Sequence[Grid], pixel_rows: int, config: VisionConfig) -> None:
    """Check a request's grids against the rows of its pixel_values. Raises InvalidRequest, naming the image."""
    for index, (t, h, w) in enumerate(grids):
        if not 1 <= t <= config.pos_emb_time:
            raise InvalidRequest(f"image {index}: grid has {t} frames, expected 1 to {config.pos_emb_time}")
        for name, side, kernel in (("rows", h, MERGE_KERNEL_SIZE[0]), ("columns", w, MERGE_KERNEL_SIZE[1])):
            if not kernel <= side <= POSITIONS_PER_SIDE or side % kernel:
                raise InvalidRequest(
                    f"image {index}: grid has {side} {name} of patches, "
                    f"expected a multiple of {kernel} from {kernel} to {POSITIONS_PER_SIDE}"
                )
    expected = sum(map(num_patches, grids))
    if pixel_rows != expected:
        raise InvalidRequest(f"pixel_values has {pixel_rows} patches, image_grid_thw describes {expected}")
