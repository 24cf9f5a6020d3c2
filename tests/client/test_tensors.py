# SPDX-License-Identifier: Apache-2.0
"""The wire forms against tritonclient's own, which was written by others."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bf16_tensor, serialize_byte_tensor

from kimi_client import ServerError
from kimi_client.tensors import pack_bytes, packed_size, to_array, unpack_bytes


@given(st.lists(st.binary(max_size=70), max_size=5))
def test_bytes_pack_as_tritonclient_packs_them(elements: list[bytes]) -> None:
    packed = pack_bytes(elements)
    assert packed_size(elements) == len(packed)
    assert unpack_bytes(packed) == elements
    if elements:
        assert packed == serialize_byte_tensor(np.array(elements, dtype=np.object_)).item()


@pytest.mark.parametrize("size", [0, 63])
def test_i1_each_element_has_its_length_in_front(size: int) -> None:
    assert pack_bytes([b"x" * size]) == struct.pack("<I", size) + b"x" * size


@pytest.mark.parametrize(
    "packed",
    [
        b"\x01",
        b"\x03\x00\x00",
        struct.pack("<I", 5) + b"four",
        struct.pack("<I", 0xFFFFFFFF),
        pack_bytes([b"a"]) + b"\0",
    ],
)
def test_g1_a_length_past_the_end_is_an_error(packed: bytes) -> None:
    with pytest.raises(ServerError, match=f"a BYTES tensor of {len(packed)} bytes ends inside"):
        unpack_bytes(packed)


def test_bf16_widens_as_tritonclient_widens_it() -> None:
    every_half = np.arange(1 << 16, dtype="<u2").tobytes()
    ours = to_array("BF16", [256, 256], every_half)
    theirs = deserialize_bf16_tensor(every_half).reshape(256, 256)
    assert ours.dtype == np.float32
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_numbers_keep_type_and_shape() -> None:
    values = np.arange(6, dtype=np.int64).reshape(1, 2, 3)
    assert np.array_equal(to_array("INT64", [1, 2, 3], values.tobytes()), values)
    assert to_array("BOOL", [1], b"\x01").item() is True


def test_zero_rows_are_a_tensor_too() -> None:
    assert to_array("BF16", [1, 0, 8], b"").shape == (1, 0, 8)


@pytest.mark.parametrize(("datatype", "raw"), [("INT32", bytes(8)), ("BF16", bytes(4)), ("BYTES", bytes(8))])
def test_a_byte_count_that_does_not_fit_the_shape_is_an_error(datatype: str, raw: bytes) -> None:
    with pytest.raises(ServerError, match=r"shape \[3\] came with 2 values"):
        to_array(datatype, [3], raw)
