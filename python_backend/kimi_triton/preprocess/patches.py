# SPDX-License-Identifier: Apache-2.0
"""From RGB pictures to the patches MoonViT reads.

Pixels stay integers of 0..255: (x / 255 - mean) / std is folded into the patch embedding of the vision tower. Resizing
is Pillow's BICUBIC, as in the reference processors; padding is black, on the right and at the bottom.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from PIL import Image

from kimi_triton.config import MERGE_KERNEL_SIZE, PATCH_SIZE
from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.images import Picture
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.preprocess.sizes import Placement, place_frames, place_image

Grid = tuple[int, int, int]  # (t, h, w) in patches, before merging

# One row of one channel of one patch. Moving these whole is several times faster than moving single bytes.
PATCH_ROW = np.dtype(f"V{PATCH_SIZE}")


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    """One media item: a picture, or the frames of one chunk of a video."""

    pixel_values: npt.NDArray[np.uint8]  # (t * h * w, 3, 14, 14), frame after frame, each in raster order
    grid: Grid
    digest: bytes  # 32 bytes: BLAKE3 over settings, grid and pixels; equal in every process


def num_image_tokens(grid: Grid) -> int:
    """Tokens of one media item: h·w/4, whatever t is, because the frames of a chunk are averaged.

    The only place where tokens are counted; placeholders and rows of image_embeds both follow it.
    """
    _, height, width = grid
    return height * width // (MERGE_KERNEL_SIZE[0] * MERGE_KERNEL_SIZE[1])


def image_to_patches(image: Picture, index: int, settings: ImageSettings) -> ImagePatches:
    """Resize, pad and cut one RGB picture, image number `index` of its request. Raises InvalidRequest (see sizes)."""
    width, height = _size(image)
    return _cut([image], place_image(width, height, index, settings), settings)


def frames_to_patches(frames: Sequence[Picture], index: int, settings: ImageSettings) -> ImagePatches:
    """Resize, pad and cut 1..temporal_merge_kernel_size RGB frames to the size that the first of them gets."""
    if not 1 <= len(frames) <= settings.temporal_merge_kernel_size:
        raise InvalidRequest(
            f"image {index}: a chunk of {len(frames)} frames, expected 1 to {settings.temporal_merge_kernel_size}"
        )
    width, height = _size(frames[0])
    return _cut(frames, place_frames(width, height, len(frames), index, settings), settings)


def _cut(frames: Sequence[Picture], placement: Placement, settings: ImageSettings) -> ImagePatches:
    grid = (len(frames), *placement.grid)
    rows = np.empty((*grid, 3, PATCH_SIZE), PATCH_ROW)
    for patches, frame in zip(rows, frames, strict=True):
        _fill(patches, _resized(frame, placement), placement)
    pixel_values = rows.view(np.uint8).reshape(-1, 3, PATCH_SIZE, PATCH_SIZE)
    digest = blake3(settings.fingerprint + struct.pack("<3q", *grid))
    digest.update(pixel_values.data.cast("B"))
    return ImagePatches(pixel_values, grid, digest.digest())


def _size(image: Picture) -> tuple[int, int]:
    """Width and height."""
    return image.size if isinstance(image, Image.Image) else (image.shape[1], image.shape[0])


def _resized(image: Picture, placement: Placement) -> npt.NDArray[np.uint8]:
    """(height, width, 3). On one thread: Pillow rounds between its two passes and chooses their order, so strips differ
    from a whole."""
    size = (placement.width, placement.height)
    if _size(image) == size:
        return np.asarray(image)
    whole = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return np.asarray(whole.resize(size, Image.Resampling.BICUBIC))


def _fill(patches: npt.NDArray[np.void], pixels: npt.NDArray[np.uint8], placement: Placement) -> None:
    """Cut a picture of the placement's size into `patches` (h, w, 3, 14)."""
    left, top, right, bottom = placement.box
    shown = pixels[top:bottom, left:right]
    # Scan lines by colour, of one row of patches: few enough to stay in the cache. What is beyond the picture is zero.
    lines = np.zeros((3, PATCH_SIZE, right - left), np.uint8)
    for row, row_of_patches in enumerate(patches):
        own = shown[row * PATCH_SIZE : (row + 1) * PATCH_SIZE].transpose(2, 0, 1)
        lines[:, : own.shape[1], : own.shape[2]] = own
        lines[:, own.shape[1] :] = 0
        row_of_patches[:] = lines.view(PATCH_ROW).transpose(2, 0, 1)
