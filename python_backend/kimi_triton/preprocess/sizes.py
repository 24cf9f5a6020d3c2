# SPDX-License-Identifier: Apache-2.0
"""How large a picture is made and which part of the canvas around it becomes patches: integers in, integers out.

The two families differ. Kimi-VL scales by the number of patches alone and refuses a side of 512 patches; Kimi-K2.5 also
scales until no side passes 512 patches. Neither enlarges. Both count the whole patches of the unpadded picture, so
padding can lift a grid above the limit (4000x3000 makes 16800 patches of 16384).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kimi_triton.config import MERGE_KERNEL_SIZE, PATCH_SIZE
from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.settings import POSITIONS_PER_SIDE, ImageSettings

CELL = PATCH_SIZE * MERGE_KERNEL_SIZE[0]  # pixels on a side of what becomes one token


@dataclass(frozen=True, slots=True)
class Placement:
    """A picture is resized to (width, height); `box` of it, which may reach beyond it, is cut into patches."""

    width: int
    height: int
    box: tuple[int, int, int, int]  # left, top, right, bottom in pixels

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w) in patches, both even and above zero."""
        left, top, right, bottom = self.box
        return (bottom - top) // PATCH_SIZE, (right - left) // PATCH_SIZE


def place_image(width: int, height: int, index: int, settings: ImageSettings) -> Placement:
    """Placement of image number `index`, `width` x `height` pixels. Raises InvalidRequest if the family refuses it."""
    return _place(width, height, index, settings, settings.in_patch_limit)


def place_frames(width: int, height: int, num_frames: int, index: int, settings: ImageSettings) -> Placement:
    """Placement of every frame of a chunk whose first frame is `width` x `height` pixels."""
    limit = settings.in_patch_limit_each_frame or settings.in_patch_limit
    if settings.in_patch_limit_video is not None:
        limit = min(round(settings.in_patch_limit_video / num_frames), limit)
    return _place(width, height, index, settings, limit)


def _place(width: int, height: int, index: int, settings: ImageSettings, patch_limit: int) -> Placement:
    scale = _scale(width, height, settings, patch_limit)
    new_width, new_height = max(1, int(width * scale)), max(1, int(height * scale))
    if settings.family == "kimi_k25":
        side = settings.patch_limit_on_one_side * PATCH_SIZE
        new_width, new_height = min(new_width, side), min(new_height, side)
    box = (_padded if settings.pad_input else _centred)(new_width, new_height)
    placement = Placement(new_width, new_height, box)
    if 0 in placement.grid:
        raise InvalidRequest(
            f"image {index}: {width}x{height} is too small, without padding a side needs {CELL} pixels"
        )
    if settings.family == "kimi_vl" and max(placement.grid) >= POSITIONS_PER_SIDE:
        raise InvalidRequest(
            f"image {index}: {width}x{height} makes {'x'.join(map(str, placement.grid))} patches (height x width), "
            f"Kimi-VL has no positions for {POSITIONS_PER_SIDE} or more on a side"
        )
    return placement


def _scale(width: int, height: int, settings: ImageSettings, patch_limit: int) -> float:
    columns, rows = width // PATCH_SIZE, height // PATCH_SIZE
    if settings.family == "kimi_vl":
        return math.sqrt(patch_limit / (columns * rows)) if columns * rows > patch_limit else 1.0
    side = settings.patch_limit_on_one_side * PATCH_SIZE
    return min(1.0, math.sqrt(patch_limit / (max(1, columns) * max(1, rows))), side / width, side / height)


def _padded(width: int, height: int) -> tuple[int, int, int, int]:
    return 0, 0, width + -width % CELL, height + -height % CELL


def _centred(width: int, height: int) -> tuple[int, int, int, int]:
    """The reference cuts to multiples of 14 and then fails on odd grids; where it works, this cut is the same."""
    cut_width, cut_height = width - width % CELL, height - height % CELL
    left, top = round((width - cut_width) / 2), round((height - cut_height) / 2)
    return left, top, left + cut_width, top + cut_height
