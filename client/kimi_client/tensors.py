# SPDX-License-Identifier: Apache-2.0
"""Tensors as the KServe protocol carries them: BYTES with length prefixes, numbers little-endian, BF16 as halves."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import triton_to_np_dtype

from kimi_client.errors import ServerError

Outputs: TypeAlias = Mapping[str, NDArray[Any]]
"""The output tensors of one response by name; BYTES as objects of type bytes, BF16 widened to float32."""


def pack_bytes(elements: Sequence[bytes]) -> bytes:
    """Return a BYTES tensor as it travels: each element after its own length, 4 bytes little-endian."""
    return b"".join(part for element in elements for part in (struct.pack("<I", len(element)), element))


def packed_size(elements: Sequence[bytes]) -> int:
    """Return the size in bytes of what `pack_bytes` returns."""
    return sum(4 + len(element) for element in elements)


def unpack_bytes(packed: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor; raises ServerError where a length points past the end."""
    elements, offset = [], 0
    while offset < len(packed):
        end = offset + 4
        if end <= len(packed):
            end += struct.unpack_from("<I", packed, offset)[0]
        if end > len(packed) or end < offset + 4:
            raise ServerError(f"a BYTES tensor of {len(packed)} bytes ends inside the element at byte {offset}")
        elements.append(packed[offset + 4 : end])
        offset = end
    return elements


def to_array(datatype: str, shape: Sequence[int], raw: bytes) -> NDArray[Any]:
    """Return the tensor behind `raw` with `shape`; raises ServerError where the byte count does not fit.

    BF16 is widened by two shifts over the whole buffer: tritonclient's own reader loops over the elements in Python
    and takes about a second per million.
    """
    if datatype == "BYTES":
        values = np.array(unpack_bytes(raw), dtype=np.object_)
    elif datatype == "BF16":
        values = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, dtype=triton_to_np_dtype(datatype))
    if values.size != math.prod(shape):
        raise ServerError(f"a {datatype} tensor of shape {list(shape)} came with {values.size} values")
    return values.reshape(shape)
