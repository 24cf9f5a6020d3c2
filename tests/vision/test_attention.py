# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kimi_triton.errors import InvalidRequest
from kimi_triton.vision import attention
from kimi_triton.vision.attention import Sequences, choose_attention, sdpa_attention
from kimi_triton.vision.grids import Grid

CPU = torch.device("cpu")
GRIDS: list[Grid] = [(1, 4, 6), (2, 4, 4), (1, 2, 2), (1, 10, 12)]


def random_qkv(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one packed tensor, as the encoder passes them: (rows, 4 heads, 72) each."""
    packed = torch.randn(rows, 3, 4, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    query, key, value = packed.unbind(1)
    return query, key, value


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """The formula, image by image and head by head."""
    out = torch.empty_like(query)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(query.shape[1]):
            scores = query[rows, head] @ key[rows, head].T / 72**0.5
            out[rows, head] = scores.softmax(-1) @ value[rows, head]
        start += length
    return out


@pytest.mark.parametrize("grids", [GRIDS, [(1, 4, 6), (1, 4, 6), (1, 6, 4), (1, 2, 2), (1, 4, 6)], [(1, 2, 2)] * 9])
def test_each_image_attends_to_itself_alone(grids: list[Grid]) -> None:
    sequences = Sequences.from_grids(grids, CPU)
    query, key, value = random_qkv(sum(sequences.lengths))
    expected = softmax_attention(query.double(), key.double(), value.double(), sequences.lengths)
    assert torch.allclose(sdpa_attention(query, key, value, sequences).double(), expected, atol=1e-5)


def test_bf16_error_is_no_larger_than_that_of_the_rounded_formula() -> None:
    sequences = Sequences.from_grids([(1, 16, 16)], CPU)
    query, key, value = random_qkv(256, torch.bfloat16)
    query, key = 2 * query, 2 * key  # scores that matter: their standard deviation is 4
    expected = softmax_attention(query.double(), key.double(), value.double(), [256])
    eager = softmax_attention(query, key, value, [256])  # every step rounded to bf16
    ours = sdpa_attention(query, key, value, sequences)
    assert (ours - expected).square().mean() < (eager - expected).square().mean()


def test_d5_sequences_are_counted_on_the_host() -> None:
    sequences = Sequences.from_grids(GRIDS, CPU)
    assert sequences.lengths == [24, 32, 4, 120]
    assert sequences.cu_seqlens.tolist() == [0, 24, 56, 60, 180]
    assert sequences.cu_seqlens.dtype == torch.int32
    assert type(sequences.max_seqlen) is int
    assert sequences.max_seqlen == 120


def test_d5_max_seqlen_follows_each_batch_up_and_down() -> None:
    longest = [Sequences.from_grids([(1, 4, 4), (1, side, side)], CPU).max_seqlen for side in (20, 2, 30)]
    assert longest == [400, 16, 900]


def test_d2_cu_seqlens_never_wrap() -> None:
    with pytest.raises(InvalidRequest, match=f"pack of {2**31} patches"):
        Sequences.from_grids([(1, 2**15, 2**16)], CPU)


def test_cpus_and_fp32_have_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert choose_attention(CPU, torch.bfloat16) is sdpa_attention
    assert choose_attention(torch.device("cuda"), torch.float32) is sdpa_attention


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), {"flash_attn", "torch.nn.attention.varlen"}, "flash_attention"),
        ((9, 0), {"torch.nn.attention.varlen"}, "varlen_attention"),
        ((9, 0), set(), "sdpa_attention"),
        ((7, 5), {"flash_attn", "torch.nn.attention.varlen"}, "sdpa_attention"),
    ],
)
def test_gpus_have_the_best_kernel_there_is(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: set[str], chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(attention, "find_spec", lambda name: name if name in installed else None)
    for name in ("flash_attention", "varlen_attention"):
        monkeypatch.setattr(attention, name, lambda name=name: name)
    monkeypatch.setattr(attention, "sdpa_attention", "sdpa_attention")
    assert choose_attention(torch.device("cuda"), torch.bfloat16) == chosen


def by_cu_seqlens(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> Tensor:
    """A stand-in for a varlen kernel: the formula, from the same seven arguments."""
    assert cu_q is cu_k
    lengths = cu_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    return softmax_attention(query, key, value, lengths)


def test_varlen_kernels_get_the_boundaries_of_the_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_attn = ModuleType("flash_attn")
    flash_attn.flash_attn_varlen_func = by_cu_seqlens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    bodies = [attention.flash_attention()]
    if find_spec("torch.nn.attention.varlen") is not None:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_cu_seqlens)
        bodies.append(attention.varlen_attention())
    sequences = Sequences.from_grids(GRIDS, CPU)
    qkv = random_qkv(180)
    for attend in bodies:
        assert torch.allclose(attend(*qkv, sequences), sdpa_attention(*qkv, sequences), atol=1e-5)
