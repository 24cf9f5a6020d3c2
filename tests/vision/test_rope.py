# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import cmath

import pytest
import torch
from torch import Tensor

from kimi_triton.vision.rope import CPU_ROWS, RotaryEmbedding, rotary_factors, rotate_

CPU = torch.device("cpu")
HEAD_DIM = 72


def frequency(index: int) -> float:
    """f_i as the reference computes it, in fp32."""
    exponent = torch.tensor(4 * index, dtype=torch.float32) / HEAD_DIM
    return (1.0 / (10000.0**exponent)).item()


def turned(x: int, y: int, vector: list[float]) -> list[float]:
    """One head of one patch in Python's complex numbers: slot 2i by the column, slot 2i + 1 by the row."""
    out: list[float] = []
    for slot in range(HEAD_DIM // 2):
        position = x if slot % 2 == 0 else y
        phase = torch.tensor(position * frequency(slot // 2), dtype=torch.float32).item()
        value = complex(vector[2 * slot], vector[2 * slot + 1]) * cmath.exp(1j * phase)
        out += [value.real, value.imag]
    return out


def rotated(qk: Tensor, freqs_cis: Tensor) -> Tensor:
    copy = qk.clone()
    rotate_(copy, freqs_cis)
    return copy


@pytest.mark.parametrize(("h", "w"), [(2, 6), (6, 2), (2, 512), (512, 2)])
def test_d4_rotation_equals_the_complex_formula(h: int, w: int) -> None:
    qk = torch.randn(h * w, 2, 1, HEAD_DIM, generator=torch.Generator().manual_seed(h))
    result = rotated(qk, rotary_factors(h, w, HEAD_DIM, CPU))
    for patch in {0, 1, w - 1, w, h * w // 2, h * w - 1}:
        y, x = divmod(patch, w)
        for part in range(2):
            expected = torch.tensor(turned(x, y, qk[patch, part, 0].tolist()))
            assert torch.allclose(result[patch, part, 0], expected, rtol=0, atol=1e-5)


def test_d4_frequencies_of_the_released_head_size() -> None:
    phases = rotary_factors(2, 2, HEAD_DIM, CPU).angle()[3]  # x = y = 1: every slot turns by its own frequency
    assert phases[0].item() == pytest.approx(1.0)
    assert phases[2].item() == pytest.approx(0.599484, abs=1e-6)
    assert phases[34].item() == pytest.approx(1.66810e-4, rel=1e-4)


def test_d4_phases_are_exact_at_the_last_position() -> None:
    phase = torch.angle(rotary_factors(1, 512, HEAD_DIM, CPU)[511, 0]).item()
    assert cmath.exp(1j * phase) == pytest.approx(cmath.exp(511j), abs=1e-5)


def test_d4_a_transposed_image_swaps_the_two_slots_of_each_pair() -> None:
    wide = rotary_factors(4, 6, HEAD_DIM, CPU).view(4, 6, -1, 2)
    tall = rotary_factors(6, 4, HEAD_DIM, CPU).view(6, 4, -1, 2)
    assert torch.equal(wide.transpose(0, 1), tall.flip(-1))
    assert not torch.equal(wide.transpose(0, 1), tall)


def test_scores_depend_on_relative_positions_alone() -> None:
    factors = rotary_factors(8, 8, HEAD_DIM, CPU).view(8, 8, 1, -1)
    vector = torch.randn(1, 2, 1, HEAD_DIM)
    query_key = [rotated(vector, factors[y, x])[0, :, 0] for y, x in ((1, 2), (3, 5), (4, 1), (6, 4))]
    first = query_key[0][0] @ query_key[1][1]
    second = query_key[2][0] @ query_key[3][1]
    assert torch.allclose(first, second, atol=1e-4)


def test_the_split_half_form_gives_the_same_scores() -> None:
    factors = rotary_factors(2, 6, HEAD_DIM, CPU)
    qk = torch.randn(12, 2, 1, HEAD_DIM)
    order = torch.arange(HEAD_DIM).view(-1, 2).t().flatten()  # even elements, then odd ones
    halves = qk[..., order]
    cos, sin = (part.repeat(1, 2)[:, None, None] for part in (factors.real, factors.imag))
    first, second = halves.chunk(2, -1)
    split_half = halves * cos + torch.cat([-second, first], -1) * sin
    ours = rotated(qk, factors)
    query, key = ours[:, 0, 0], ours[:, 1, 0]
    other_query, other_key = split_half[:, 0, 0], split_half[:, 1, 0]
    assert torch.allclose(query @ key.T, other_query @ other_key.T, atol=1e-4)


def test_half_precision_is_rounded_once() -> None:
    qk = torch.randn(24, 2, 2, HEAD_DIM).bfloat16()
    factors = rotary_factors(4, 6, HEAD_DIM, CPU)
    assert torch.equal(rotated(qk, factors), rotated(qk.float(), factors).bfloat16())


def test_a_slice_of_a_larger_tensor_is_turned_in_place_and_nothing_else() -> None:
    rows = 2 * CPU_ROWS + 3  # more than one block, the last one partly filled
    qkv = torch.randn(rows, 3, 2, 8)
    before = qkv.clone()
    factors = rotary_factors(1, rows, 8, CPU)
    rotate_(qkv[:, :2], factors)
    expected = torch.view_as_complex(before[:, :2].unflatten(-1, (-1, 2))) * factors[:, None, None]
    assert torch.allclose(qkv[:, :2], torch.view_as_real(expected).flatten(-2), atol=1e-6)
    assert torch.equal(qkv[:, 2], before[:, 2])


def test_a_pack_is_its_images_one_after_another_with_frames_repeated() -> None:
    rope = RotaryEmbedding(HEAD_DIM)
    packed = rope.freqs_cis([(1, 2, 6), (2, 4, 2), (1, 2, 6)], CPU)
    wide, tall = rotary_factors(2, 6, HEAD_DIM, CPU), rotary_factors(4, 2, HEAD_DIM, CPU)
    assert torch.equal(packed, torch.cat([wide, tall, tall, wide]))
    assert packed.dtype == torch.complex64
    assert len(rope.tables) == 2
