# SPDX-License-Identifier: Apache-2.0
"""Plain weights from the packed int4 experts of Kimi-K2.5 (compressed-tensors, `pack-quantized`, symmetric, grouped).

Eight values lie in one int32 along the input dimension, the first in the lowest nibble, each stored as value + 8:
[-8, -7, -1, 0, 1, 2, 3, 7] packs to 0xfba98710. A weight is its value times the scale of its group of input columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_triton.errors import ConfigError

NIBBLE_BITS = 4
ZERO_POINT = 8


def unpack_int4(packed: Tensor) -> Tensor:
    """(rows, columns / 8) int32 -> (rows, columns) int32 in -8..7."""
    shifts = torch.arange(0, 32, NIBBLE_BITS, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return nibbles.flatten(1) - ZERO_POINT


def dequantize(packed: Tensor, scale: Tensor, shape: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, columns / 8) int32 and (rows, columns / group) scales -> (rows, columns) of `dtype`.

    `shape` holds the two sides of the original matrix. Raises ConfigError when the three do not belong together.
    """
    if packed.dtype != torch.int32 or not scale.is_floating_point():
        raise ConfigError(f"packed weights are {packed.dtype} with {scale.dtype} scales, expected int32 and floats")
    values = unpack_int4(packed)
    fits = scale.shape[0] == values.shape[0] and values.shape[1] % scale.shape[1] == 0
    if values.shape != tuple(shape.tolist()) or not fits:
        raise ConfigError(
            f"packed weight unpacks to {list(values.shape)} with scales {list(scale.shape)}, "
            f"weight_shape says {shape.tolist()}"
        )
    grouped = values.view(*scale.shape, -1).float() * scale.float().unsqueeze(-1)
    return grouped.flatten(1).to(dtype)
