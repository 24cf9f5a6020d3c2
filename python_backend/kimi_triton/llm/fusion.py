# SPDX-License-Identifier: Apache-2.0
"""Image rows take the places of the placeholders in a prompt; every count that must agree is checked first."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimi_triton.config import MERGE_KERNEL_SIZE
from kimi_triton.errors import InvalidRequest, KimiError


def check_placeholders(
    input_ids: NDArray[np.int32], image_grid_thw: NDArray[np.int64], num_image_rows: int, media_id: int
) -> None:
    """Raise InvalidRequest unless placeholders, grids and embedding rows tell the same story.

    input_ids (num_tokens,), image_grid_thw (num_images, 3). Each image is one run of `media_id`, h * w / 4 long:
    a wrong length shifts every later image by some rows, which still reads like an answer.
    """
    if image_grid_thw.ndim != 2 or image_grid_thw.shape[1] != 3:
        raise InvalidRequest(f"image_grid_thw has shape {list(image_grid_thw.shape)}, expected [num_images, 3]")
    runs = placeholder_runs(input_ids, media_id)
    if sum(runs) != num_image_rows:
        raise InvalidRequest(
            f"input_ids has {sum(runs)} image placeholders, but image_embeds has {num_image_rows} rows"
        )
    if len(runs) != len(image_grid_thw):
        raise InvalidRequest(
            f"input_ids has {len(runs)} runs of image placeholders, but image_grid_thw describes "
            f"{len(image_grid_thw)} images"
        )
    for index, (run, grid) in enumerate(zip(runs, image_grid_thw.tolist(), strict=True)):
        if run != (expected := num_image_tokens(grid, index)):
            raise InvalidRequest(
                f"image {index}: input_ids has {run} placeholders, its grid {grid} stands for {expected} tokens"
            )


def placeholder_runs(input_ids: NDArray[np.int32], media_id: int) -> list[int]:
    """Lengths of the unbroken runs of `media_id`, in order."""
    edges = np.diff(np.concatenate(([False], input_ids == media_id, [False])).astype(np.int8))
    return [int(length) for length in np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)]


def num_image_tokens(grid: list[int], index: int) -> int:
    """Tokens of one image or chunk: its frames are averaged, each 2 x 2 patches become one."""
    frames, height, width = grid
    if frames < 1 or height < 1 or width < 1 or height % MERGE_KERNEL_SIZE[0] or width % MERGE_KERNEL_SIZE[1]:
        raise InvalidRequest(f"image {index}: grid {grid} needs a frame and even, positive sides")
    return height * width // (MERGE_KERNEL_SIZE[0] * MERGE_KERNEL_SIZE[1])


def merge_image_rows(text_rows: Tensor, is_placeholder: Tensor, image_embeds: Tensor) -> Tensor:
    """Write image_embeds (num_image_tokens, hidden) into text_rows (num_tokens, hidden), in place, and return it.

    is_placeholder is (num_tokens,) bool. Raises InvalidRequest when the counts or the widths differ: an assignment
    by mask would silently broadcast one row to all places.
    """
    places, rows = int(is_placeholder.sum()), image_embeds.shape[0]
    if places != rows:
        raise InvalidRequest(f"input_ids has {places} image placeholders, but image_embeds has {rows} rows")
    if image_embeds.shape[1:] != text_rows.shape[1:]:
        raise InvalidRequest(
            f"image_embeds rows have shape {list(image_embeds.shape[1:])}, the language model takes "
            f"{list(text_rows.shape[1:])}"
        )
    if not rows:
        return text_rows
    if bad := int((~torch.isfinite(image_embeds)).any(dim=1).sum()):
        raise KimiError(f"image_embeds has {bad} rows of {rows} with values that are not finite")
    text_rows[is_placeholder] = image_embeds.to(text_rows)
    return text_rows
