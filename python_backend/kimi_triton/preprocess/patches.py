# SPDX-License-Identifier: Apache-2.0
"""From RGB pictures to the patches MoonViT reads.

Pixels stay integers of 0..255: (x / 255 - mean) / std is folded into the patch embedding of the vision tower. Resizing
is Pillow's BICUBIC, as in the reference processors; padding is black, on the right and at the bottom.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from kimi_triton.config import MERGE_KERNEL_SIZE, PATCH_SIZE
from kimi_triton.errors import InvalidRequest
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
    digest: bytes  # 32 bytes: SHA-256 over settings, grid and pixels; equal in every process


def num_image_tokens(grid: Grid) -> int:
    """Tokens of one media item: h·w/4, whatever t is, because the frames of a chunk are averaged.

    The only place where tokens are counted; placeholders and rows of image_embeds both follow it.
    """
    _, height, width = grid
    return height * width // (MERGE_KERNEL_SIZE[0] * MERGE_KERNEL_SIZE[1])


def image_to_patches(image: Image.Image, index: int, settings: ImageSettings) -> ImagePatches:
    """Resize, pad and cut one RGB picture, image number `index` of its request. Raises InvalidRequest (see sizes)."""
    placement = place_image(image.width, image.height, index, settings)
    return _cut([image], placement, settings)


def frames_to_patches(frames: Sequence[Image.Image], index: int, settings: ImageSettings) -> ImagePatches:
    """Resize, pad and cut 1..temporal_merge_kernel_size RGB frames to the size that the first of them gets."""
    if not 1 <= len(frames) <= settings.temporal_merge_kernel_size:
        raise InvalidRequest(
            f"image {index}: a chunk of {len(frames)} frames, expected 1 to {settings.temporal_merge_kernel_size}"
        )
    placement = place_frames(frames[0].width, frames[0].height, len(frames), index, settings)
    return _cut(frames, placement, settings)


def _cut(frames: Sequence[Image.Image], placement: Placement, settings: ImageSettings) -> ImagePatches:
    height, width = placement.grid
    rows = np.empty((len(frames), height, width, 3, PATCH_SIZE), PATCH_ROW)
    for patches, frame in zip(rows, frames, strict=True):
        patches[:] = _patch_rows(frame, placement)
    pixel_values = rows.view(np.uint8).reshape(-1, 3, PATCH_SIZE, PATCH_SIZE)
    grid = (len(frames), height, width)
    return ImagePatches(pixel_values, grid, _digest(pixel_values, grid, settings))


def _patch_rows(image: Image.Image, placement: Placement) -> npt.NDArray[np.void]:
    """(h, w, 3, 14) patch rows of one picture; a view, its memory is in scan lines."""
    size = (placement.width, placement.height)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    if placement.box != (0, 0, *size):
        image = image.crop(placement.box)  # what lies beyond the picture becomes zero
    height, width = placement.grid
    scan_lines = image.tobytes("raw", "RGB;L")  # each line as all its red, all its green, all its blue
    return np.frombuffer(scan_lines, PATCH_ROW).reshape(height, PATCH_SIZE, 3, width).transpose(0, 3, 2, 1)


def _digest(pixel_values: npt.NDArray[np.uint8], grid: Grid, settings: ImageSettings) -> bytes:
    digest = hashlib.sha256(settings.fingerprint)
    digest.update(struct.pack("<3q", *grid))
    digest.update(pixel_values.data)
    return digest.digest()
