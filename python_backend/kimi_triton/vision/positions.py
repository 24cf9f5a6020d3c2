# SPDX-License-Identifier: Apache-2.0
"""Absolute positions: a learned table resampled to each image, and sinusoids over the frames of a video chunk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kimi_triton.vision.grids import Grid

Key = tuple[int, int, torch.dtype, torch.device]
MAX_ENTRIES = 256
MAX_BYTES = 256 << 20


class PositionTables:
    """Tables that depend on an image's (h, w) alone; the least recently used ones are forgotten first.

    Bounded by entries and by bytes, because 256 large tables would be gigabytes. A table above the byte budget is made
    anew each time. `make(h, w, dtype, device)` must return a tensor that owns its storage. Not thread-safe: a model
    owns its tables, and one thread runs a model.
    """

    def __init__(
        self,
        make: Callable[[int, int, torch.dtype, torch.device], Tensor],
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._make = make
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._tables: OrderedDict[Key, Tensor] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._tables)

    def get(self, h: int, w: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The table of an h x w image; callers must not write into it."""
        key = (h, w, dtype, device)
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        table = self._make(h, w, dtype, device)
        if table.nbytes <= self._max_bytes and self._max_entries > 0:
            self._tables[key] = table
            self.num_bytes += table.nbytes
            self._shrink()
        return table

    def _shrink(self) -> None:
        while len(self._tables) > self._max_entries or self.num_bytes > self._max_bytes:
            _, oldest = self._tables.popitem(last=False)
            self.num_bytes -= oldest.nbytes


class PositionEmbedding(nn.Module):
    """The learned table `weight` (table_h, table_w, hidden_size), resampled to any image."""

    def __init__(self, table_h: int, table_w: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(table_h, table_w, hidden_size))
        self.tables = PositionTables(self._resampled)

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """grids -> (num_patches, hidden_size), in the dtype and on the device of `weight`."""
        return torch.cat([self._one_image(grid) for grid in grids])

    def _one_image(self, grid: Grid) -> Tensor:
        t, h, w = grid
        table = self.tables.get(h, w, self.weight.dtype, self.weight.device)  # (h * w, hidden_size)
        if t == 1:
            return table
        frames = sinusoids(t, table.shape[-1], table.device)
        return (table.float() + frames[:, None]).to(table.dtype).flatten(0, 1)  # (t * h * w, hidden_size)

    def _resampled(self, h: int, w: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return resample(self.weight, h, w).to(device=device, dtype=dtype, copy=True)


def resample(table: Tensor, h: int, w: int) -> Tensor:
    """(table_h, table_w, hidden_size) -> (h * w, hidden_size): bicubic in fp32, never antialiased, row-major.

    A table of the same size comes back unchanged. Half-precision interpolation is coarse, so it happens in fp32.
    """
    if table.shape[:2] == (h, w):
        return table.flatten(0, 1)
    channels_first = table.float().permute(2, 0, 1)[None]
    resized = F.interpolate(channels_first, size=(h, w), mode="bicubic", align_corners=False, antialias=False)
    return resized[0].permute(1, 2, 0).flatten(0, 1)


def sinusoids(t: int, hidden_size: int, device: torch.device) -> Tensor:
    """Rows [sin(f * omega) | cos(f * omega)] for frames f = 0 .. t-1, omega_j = 10000 ** (-2j / hidden_size).

    (t, hidden_size) float32. K2.5 adds them to chunks of several frames, row 0 included; a single image has none.
    """
    omega = 10000.0 ** (-torch.arange(0, hidden_size, 2, dtype=torch.float32, device=device) / hidden_size)
    phases = torch.arange(t, dtype=torch.float32, device=device)[:, None] * omega
    return torch.cat([phases.sin(), phases.cos()], dim=1)
