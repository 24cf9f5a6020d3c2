# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from kimi_triton.vision.positions import PositionEmbedding, PositionTables, resample, sinusoids

CPU = torch.device("cpu")
GRIDS = [(2, 2), (2, 144), (36, 46), (46, 36), (110, 148)]


def cubic(x: float, a: float = -0.75) -> float:
    """Keys' cubic kernel."""
    x = abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def interpolation_matrix(size: int, table_size: int) -> Tensor:
    """(size, table_size) float64: half-pixel centres, clamped borders, four taps, no antialiasing."""
    matrix = torch.zeros(size, table_size, dtype=torch.float64)
    for row in range(size):
        source = (row + 0.5) * table_size / size - 0.5
        for tap in range(math.floor(source) - 1, math.floor(source) + 3):
            matrix[row, min(max(tap, 0), table_size - 1)] += cubic(source - tap)
    return matrix


@pytest.mark.parametrize(("h", "w"), GRIDS)
def test_d3_resampling_equals_the_bicubic_formula(h: int, w: int) -> None:
    table = torch.randn(64, 64, 5, generator=torch.Generator().manual_seed(0))
    rows, columns = interpolation_matrix(h, 64), interpolation_matrix(w, 64)
    expected = torch.einsum("hi,wj,ijc->hwc", rows, columns, table.double()).flatten(0, 1)
    # torch rounds the source coordinates to fp32, which moves values of size 4 by up to 2e-5.
    assert torch.allclose(resample(table, h, w).double(), expected, rtol=0, atol=3e-5)


def test_d3_a_grid_of_the_tables_size_is_untouched() -> None:
    table = torch.randn(64, 64, 5)
    assert torch.equal(resample(table, 64, 64), table.reshape(-1, 5))


def test_d3_half_precision_tables_are_resampled_in_fp32() -> None:
    table = torch.randn(64, 64, 5).bfloat16()
    assert torch.equal(resample(table, 36, 46), resample(table.float(), 36, 46))


def test_d3_remembered_tables_equal_fresh_ones() -> None:
    embedding = PositionEmbedding(16, 16, 8).requires_grad_(False)
    embedding.weight.normal_()
    grids = [(1, 4, 6), (1, 6, 4), (1, 4, 6)]
    first, again = embedding(grids), embedding(grids)
    fresh = torch.cat([resample(embedding.weight, h, w) for _, h, w in grids])
    assert torch.equal(first, again)
    assert torch.equal(first, fresh)
    assert len(embedding.tables) == 2


def test_d3_keys_carry_the_dtype() -> None:
    embedding = PositionEmbedding(16, 16, 8).requires_grad_(False)
    embedding.weight.normal_()
    full = embedding([(1, 4, 6)])
    half = embedding.bfloat16()([(1, 4, 6)])
    assert half.dtype == torch.bfloat16
    # Each weight is rounded to 8 bits, and bicubic weights of both signs add up to less than 4 roundings.
    assert torch.allclose(full, half.float(), rtol=2**-6, atol=2**-6)


def test_single_images_have_no_temporal_term_and_chunks_have_one_per_frame() -> None:
    embedding = PositionEmbedding(16, 16, 8).requires_grad_(False)
    embedding.weight.normal_()
    image = embedding([(1, 4, 6)])
    chunk = embedding([(3, 4, 6)]).view(3, 24, 8)
    assert torch.allclose(chunk - image, sinusoids(3, 8, CPU)[:, None].expand(3, 24, 8), atol=1e-6)


def test_sinusoids_follow_their_formula() -> None:
    rows = sinusoids(4, 1152, CPU)
    for frame in range(4):
        for j in (0, 1, 300, 575):
            omega = 10000 ** (-j / 576)
            assert rows[frame, j].item() == pytest.approx(math.sin(frame * omega), abs=1e-5)
            assert rows[frame, 576 + j].item() == pytest.approx(math.cos(frame * omega), abs=1e-5)


class Maker:
    """Makes tables of 4 bytes an entry and remembers what it was asked for."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    def __call__(self, h: int, w: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.made.append((h, w))
        return torch.zeros(h * w, dtype=dtype, device=device)


def get(tables: PositionTables, h: int, w: int = 1) -> Tensor:
    return tables.get(h, w, torch.float32, CPU)


def test_the_least_recently_used_table_goes_first() -> None:
    maker = Maker()
    tables = PositionTables(maker, max_entries=2)
    get(tables, 1)
    get(tables, 2)
    get(tables, 1)  # 2 is now the least recently used, though 1 is the oldest
    get(tables, 3)
    maker.made.clear()
    get(tables, 1)
    assert maker.made == []
    get(tables, 2)
    assert maker.made == [(2, 1)]


def test_the_byte_budget_holds_for_the_real_storage() -> None:
    tables = PositionTables(Maker(), max_bytes=400)
    get(tables, 60)
    get(tables, 30)
    assert (len(tables), tables.num_bytes) == (2, 360)
    get(tables, 40)
    assert (len(tables), tables.num_bytes) == (2, 280)


def test_f4_a_table_above_the_budget_is_served_but_not_kept() -> None:
    maker = Maker()
    tables = PositionTables(maker, max_bytes=400)
    get(tables, 50)
    assert len(get(tables, 101)) == 101
    assert (len(tables), tables.num_bytes) == (1, 200)
    maker.made.clear()
    get(tables, 50)
    assert maker.made == []


def test_f4_five_thousand_sizes_stay_within_both_bounds() -> None:
    tables = PositionTables(Maker(), max_entries=256, max_bytes=2_000_000)
    sizes = random.Random(0)
    most_entries = most_bytes = 0
    for _ in range(5000):
        get(tables, 2 * sizes.randint(1, 50), 2 * sizes.randint(1, 50))
        most_entries, most_bytes = max(most_entries, len(tables)), max(most_bytes, tables.num_bytes)
    assert 200 < most_entries <= 256
    assert 1_900_000 < most_bytes <= 2_000_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f4_entries_own_their_storage(dtype: torch.dtype) -> None:
    embedding = PositionEmbedding(16, 16, 8).requires_grad_(False).to(dtype)
    embedding([(1, 4, 6), (1, 16, 16), (1, 30, 2), (3, 8, 8)])
    stored = list(embedding.tables._tables.values())
    assert len(stored) == 4
    assert embedding.tables.num_bytes == sum(table.untyped_storage().nbytes() for table in stored)
    assert embedding.weight.untyped_storage().data_ptr() not in [t.untyped_storage().data_ptr() for t in stored]
