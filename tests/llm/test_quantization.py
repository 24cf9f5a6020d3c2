# SPDX-License-Identifier: Apache-2.0
"""Packed int4 weights, against the vector of the format and against packing by hand."""

from __future__ import annotations

import pytest
import torch

from kimi_triton.errors import ConfigError
from kimi_triton.llm.quantization import dequantize, unpack_int4

VECTOR = [-8, -7, -1, 0, 1, 2, 3, 7]


def pack(values: torch.Tensor) -> torch.Tensor:
    """Sum of (value + 8) * 16^column, as unsigned 32 bits."""
    weighted = (values.long() + 8).view(values.shape[0], -1, 8) * 16 ** torch.arange(8)
    return (weighted.sum(-1) - 2**32 * (weighted.sum(-1) >= 2**31)).int()


def test_the_published_vector_unpacks() -> None:
    packed = torch.tensor([[0xFBA98710 - 2**32]], dtype=torch.int32)
    assert unpack_int4(packed).tolist() == [VECTOR]


def test_a_weight_is_its_value_times_the_scale_of_its_group() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (6, 96), generator=generator)
    scale = torch.rand(6, 3, generator=generator).bfloat16()
    weight = dequantize(pack(values), scale, torch.tensor([6, 96], dtype=torch.int32), torch.float32)
    assert torch.equal(weight, values.float() * scale.float().repeat_interleave(32, dim=1))
    assert dequantize(pack(values), scale, torch.tensor([6, 96]), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("packed_dtype", "scale_shape", "shape", "message"),
    [
        (torch.int32, (2, 1), (2, 24), r"unpacks to \[2, 32\] .* weight_shape says \[2, 24\]"),
        (torch.int32, (2, 3), (2, 32), r"scales \[2, 3\]"),
        (torch.int32, (3, 1), (2, 32), r"scales \[3, 1\]"),
        (torch.float32, (2, 1), (2, 32), "expected int32"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    packed_dtype: torch.dtype, scale_shape: tuple[int, int], shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dequantize(torch.zeros(2, 4, dtype=packed_dtype), torch.ones(scale_shape), torch.tensor(shape), torch.float32)
