# SPDX-License-Identifier: Apache-2.0
"""How pixels reach the processes of a group and rows come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kimi_triton.config import PATCH_SIZE
from kimi_triton.errors import InvalidRequest, KimiError
from kimi_triton.vision.grids import Grid, num_image_tokens, num_patches
from kimi_triton.workers.buffers import SharedBuffer

Result = list[Tensor | KimiError]


class Exchange:
    """Both buffers, as parent and workers see them: images one after the other, in the order of their grids."""

    def __init__(self, pixels_fd: int, rows_fd: int, hidden_size: int) -> None:
        self._pixels = SharedBuffer(pixels_fd)
        self._rows = SharedBuffer(rows_fd)
        self._hidden_size = hidden_size

    def write_images(self, images: Sequence[Tensor]) -> None:
        torch.cat(list(images), out=self._pixel_values(sum(map(len, images))))

    def images(self, grids: Sequence[Grid]) -> list[Tensor]:
        patches = [num_patches(grid) for grid in grids]
        return list(torch.split(self._pixel_values(sum(patches)), patches))

    def write_rows(self, encoded: Sequence[Tensor | KimiError], grids: Sequence[Grid], dtype: torch.dtype) -> None:
        """An image with an error leaves its place as it is."""
        for rows, place in zip(encoded, self._places(grids, dtype), strict=True):
            if isinstance(rows, Tensor):
                place.copy_(rows)

    def take_rows(self, grids: Sequence[Grid], dtype: torch.dtype, errors: Mapping[int, str]) -> Result:
        """Copies of the rows, or the error, of each image. The buffers are free for the next job."""
        places = self._places(grids, dtype)
        taken: Result = [
            InvalidRequest(errors[index]) if index in errors else place.clone() for index, place in enumerate(places)
        ]
        self._rows.shrink(sum(place.nbytes for place in places))
        self._pixels.shrink(sum(map(num_patches, grids)) * 3 * PATCH_SIZE**2)
        return taken

    def _pixel_values(self, num_patches: int) -> Tensor:
        return self._pixels.tensor(torch.uint8, num_patches, 3, PATCH_SIZE, PATCH_SIZE)

    def _places(self, grids: Sequence[Grid], dtype: torch.dtype) -> list[Tensor]:
        tokens = [num_image_tokens(grid) for grid in grids]
        return list(torch.split(self._rows.tensor(dtype, sum(tokens), self._hidden_size), tokens))
