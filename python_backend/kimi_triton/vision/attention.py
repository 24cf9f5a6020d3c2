# SPDX-License-Identifier: Apache-2.0
"""Attention within each image of a pack. One signature, three bodies, chosen once when the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, groupby
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from kimi_triton.errors import InvalidRequest
from kimi_triton.vision.grids import Grid, num_patches

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Where each image lies in a pack, made once per forward on the host so that no layer asks the device."""

    lengths: list[int]  # patches of each image; all frames of a chunk attend to each other
    cu_seqlens: Tensor  # (num_images + 1,) int32, on the device of the pack
    max_seqlen: int

    @classmethod
    def from_grids(cls, grids: Sequence[Grid], device: torch.device) -> Sequences:
        lengths = [num_patches(grid) for grid in grids]
        ends = [0, *accumulate(lengths)]
        if ends[-1] > INT32_MAX:
            raise InvalidRequest(f"a pack of {ends[-1]} patches is above the {INT32_MAX} that cu_seqlens can index")
        pin = device.type == "cuda"
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, pin_memory=pin).to(device, non_blocking=pin)
        return cls(lengths, cu_seqlens, max(lengths, default=0))


# (num_patches, num_heads, head_dim) queries, keys, values -> (num_patches, num_heads, head_dim)
Attention = Callable[[Tensor, Tensor, Tensor, Sequences], Tensor]


def choose_attention(device: torch.device, dtype: torch.dtype) -> Attention:
    """flash-attn where it is installed, else torch's own varlen kernel, else one SDPA call for each image.

    Both varlen kernels are for half precision on GPUs of compute capability 8.0 and above.
    """
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0):
        if find_spec("flash_attn") is not None:
            return flash_attention()
        if find_spec("torch.nn.attention.varlen") is not None:
            return varlen_attention()
    return sdpa_attention


def flash_attention() -> Attention:
    """The flash-attn package; scale head_dim ** -0.5 is its default."""
    from flash_attn import flash_attn_varlen_func

    def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        cu, longest = sequences.cu_seqlens, sequences.max_seqlen
        return cast(Tensor, flash_attn_varlen_func(query, key, value, cu, cu, longest, longest))

    return attend


def varlen_attention() -> Attention:
    """torch's own varlen kernel (torch 2.10 and later), with the same defaults."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        cu, longest = sequences.cu_seqlens, sequences.max_seqlen
        return cast(Tensor, varlen_attn(query, key, value, cu, cu, longest, longest))

    return attend


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Any device and dtype. Images attend one by one, neighbours of equal size as one batch, so there is no mask."""
    attended: list[Tensor] = []
    start = 0
    for length, run in groupby(sequences.lengths):
        count = len(list(run))
        rows = slice(start, start + count * length)
        shape = (count, length, *query.shape[1:])
        q, k, v = (part[rows].view(shape).transpose(1, 2) for part in (query, key, value))
        attended.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
        start = rows.stop
    return attended[0] if len(attended) == 1 else torch.cat(attended)
