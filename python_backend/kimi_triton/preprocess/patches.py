# SPDX-License-Identifier: Apache-2.0
"""From RGB pictures to the patches MoonViT reads.

Pixels stay integers of 0..255: (x / 255 - mean) / std is folded into the patch embedding of the vision tower. Resizing
is Pillow's BICUBIC, as in the reference processors; padding is black, on the right and at the bottom.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

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
BAND_PATCHES = 1024  # that are cut and hashed at a time, in whole rows; digests depend on it
SPREAD_ROWS = 3 * PATCH_SIZE * 4096  # rows of as many patches are hashed elsewhere; fewer sooner than a thread wakes

# map, or a pool's, which takes every argument at once on the caller's thread and calls on others.
Map = Callable[[Callable[[npt.NDArray[np.void]], bytes], Iterable[npt.NDArray[np.void]]], Iterable[bytes]]


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    """One media item: a picture, or the frames of one chunk of a video."""

    pixel_values: npt.NDArray[np.uint8]  # (t * h * w, 3, 14, 14), frame after frame, each in raster order
    grid: Grid
    digest: bytes  # 32 bytes: SHA-256 over settings, grid and those of bands of pixels; equal in every process


def num_image_tokens(grid: Grid) -> int:
    """Tokens of one media item: h·w/4, whatever t is, because the frames of a chunk are averaged.

    The only place where tokens are counted; placeholders and rows of image_embeds both follow it.
    """
    _, height, width = grid
    return height * width // (MERGE_KERNEL_SIZE[0] * MERGE_KERNEL_SIZE[1])


def image_to_patches(image: Image.Image, index: int, settings: ImageSettings, hash_map: Map = map) -> ImagePatches:
    """Resize, pad and cut one RGB picture, image number `index` of its request. Raises InvalidRequest (see sizes).

    `hash_map` may hash on other threads what is cut on this one.
    """
    placement = place_image(image.width, image.height, index, settings)
    return _cut([image], placement, settings, hash_map)


def frames_to_patches(frames: Sequence[Image.Image], index: int, settings: ImageSettings) -> ImagePatches:
    """Resize, pad and cut 1..temporal_merge_kernel_size RGB frames to the size that the first of them gets."""
    if not 1 <= len(frames) <= settings.temporal_merge_kernel_size:
        raise InvalidRequest(
            f"image {index}: a chunk of {len(frames)} frames, expected 1 to {settings.temporal_merge_kernel_size}"
        )
    placement = place_frames(frames[0].width, frames[0].height, len(frames), index, settings)
    return _cut(frames, placement, settings, map)


def _cut(frames: Sequence[Image.Image], placement: Placement, settings: ImageSettings, hash_map: Map) -> ImagePatches:
    grid = (len(frames), *placement.grid)
    rows = np.empty((*grid, 3, PATCH_SIZE), PATCH_ROW)
    bands = chain.from_iterable(
        _bands(_resized(frame, placement), placement, patches) for patches, frame in zip(rows, frames, strict=True)
    )
    digest = hashlib.sha256(settings.fingerprint)
    digest.update(struct.pack("<3q", *grid))
    for band_digest in (hash_map if rows.size >= SPREAD_ROWS else map)(_sha256, bands):
        digest.update(band_digest)
    return ImagePatches(rows.view(np.uint8).reshape(-1, 3, PATCH_SIZE, PATCH_SIZE), grid, digest.digest())


def _resized(image: Image.Image, placement: Placement) -> Image.Image:
    """On one thread: Pillow rounds between its two passes and chooses their order, so strips differ from a whole."""
    size = (placement.width, placement.height)
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _bands(image: Image.Image, placement: Placement, patches: npt.NDArray[np.void]) -> Iterator[npt.NDArray[np.void]]:
    """Fill `patches` (h, w, 3, 14) from a picture of the placement's size; each part is yielded once it is filled.

    Parts are small, so that their scan lines use the same few pages of memory again and again.
    """
    left, top, right, _ = placement.box
    width = placement.grid[1]
    band_rows = max(1, BAND_PATCHES // width)
    for start in range(0, len(patches), band_rows):
        band = patches[start : start + band_rows]
        height = len(band)
        first_line = top + start * PATCH_SIZE
        # What lies beyond the picture becomes zero.
        part = image.crop((left, first_line, right, first_line + height * PATCH_SIZE))
        scan_lines = part.tobytes("raw", "RGB;L")  # each line as all its red, all its green, all its blue
        band[:] = np.frombuffer(scan_lines, PATCH_ROW).reshape(height, PATCH_SIZE, 3, width).transpose(0, 3, 2, 1)
        yield band


def _sha256(band: npt.NDArray[np.void]) -> bytes:
    return hashlib.sha256(band.data.cast("B")).digest()
