# SPDX-License-Identifier: Apache-2.0
"""2-D rotary position embedding: each adjacent pair of a head turns with the patch's column or its row, in turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_triton.vision.grids import Grid
from kimi_triton.vision.positions import PositionTables

THETA = 10000.0
CPU_ROWS = 128  # a block of this many patches keeps its fp32 copy inside a core's L2 cache


class RotaryEmbedding:
    """Makes `freqs_cis` for a pack of images out of remembered pieces, one per (h, w)."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self.tables = PositionTables(self._factors)

    def freqs_cis(self, grids: Sequence[Grid], device: torch.device) -> Tensor:
        """grids -> (num_patches, head_dim / 2) complex64. Every frame of a chunk has the same factors."""
        return torch.cat([self.tables.get(h, w, torch.complex64, device) for t, h, w in grids for _ in range(t)])

    def _factors(self, h: int, w: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return rotary_factors(h, w, self._head_dim, device).to(dtype)


def rotary_factors(h: int, w: int, head_dim: int, device: torch.device) -> Tensor:
    """(h * w, head_dim / 2) complex64, row-major over patches.

    Factor 2i turns by x * f_i and factor 2i + 1 by y * f_i, with f_i = 10000 ** (-4i / head_dim), x the column and
    y the row. Phases are fp32: bf16 cannot tell positions above 256 apart.
    """
    exponents = torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / THETA**exponents  # (head_dim / 4,)
    x = torch.arange(w, dtype=torch.float32, device=device).repeat(h)
    y = torch.arange(h, dtype=torch.float32, device=device).repeat_interleave(w)
    phases = torch.stack([x, y], dim=-1)[:, None, :] * frequencies[:, None]  # (h * w, head_dim / 4, 2)
    phases = phases.flatten(1)
    return torch.polar(torch.ones_like(phases), phases)


def rotate_(qk: Tensor, freqs_cis: Tensor) -> None:
    """Turn (num_patches, 2, num_heads, head_dim) queries and keys in place, in fp32, then round once."""
    rows = CPU_ROWS if qk.device.type == "cpu" else max(1, len(qk))
    for start in range(0, len(qk), rows):
        block = qk[start : start + rows]
        turned = block.float()
        pairs = torch.view_as_complex(turned.view(*turned.shape[:-1], -1, 2))
        pairs.mul_(freqs_cis[start : start + rows, None, None])
        block.copy_(turned)
