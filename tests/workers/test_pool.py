# SPDX-License-Identifier: Apache-2.0
"""N worker processes give what one process gives, in order, for any number and mix of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kimi_triton.errors import ConfigError
from kimi_triton.vision.grids import Grid, num_image_tokens
from kimi_triton.vision.local import load_in_process
from kimi_triton.workers.pool import WorkerPool
from tests.workers.conftest import random_images, started_pool, vision_options

# Very different sizes; chunks of several frames have h * w / 4 rows like single ones.
SIZES: list[Grid] = [(1, 2, 2), (1, 20, 30), (4, 6, 4), (1, 2, 40), (2, 8, 8), (1, 16, 16), (3, 2, 2), (1, 4, 2)]
FIFTY = [SIZES[number * number % len(SIZES)] for number in range(50)]
Encode = Callable[[list[Tensor], list[Grid]], list[Tensor]]


@pytest.fixture(scope="module")
def one_process(tiny_k25: Path) -> Encode:
    encoder = load_in_process(vision_options(tiny_k25, "instances"), lambda _done, _total: None)
    return lambda images, grids: rows_of(encoder.encode(images, grids))


@pytest.fixture(scope="module")
def data_pool(tiny_k25: Path) -> Iterator[WorkerPool]:
    with started_pool(vision_options(tiny_k25, "data", 3)) as pool:
        yield pool


@pytest.fixture(scope="module")
def tensor_pool(tiny_k25: Path) -> Iterator[WorkerPool]:
    with started_pool(vision_options(tiny_k25, "tensor", 2)) as pool:
        yield pool


def rows_of(encoded: object) -> list[Tensor]:
    results = list(encoded)  # type: ignore[call-overload]
    assert all(isinstance(rows, Tensor) for rows in results), results
    return results


@pytest.mark.parametrize("number", [0, 1, "N-1", "N", "N+1", 50])
def test_e1_data_workers_equal_one_process_bit_for_bit(
    number: int | str, data_pool: WorkerPool, one_process: Encode
) -> None:
    count = number if isinstance(number, int) else len(data_pool.groups) + {"N-1": -1, "N": 0, "N+1": 1}[number]
    grids = FIFTY[:count]
    images = random_images(grids)
    encoded = rows_of(data_pool.encode(images, grids))
    assert [len(rows) for rows in encoded] == [num_image_tokens(grid) for grid in grids]
    for rows, expected in zip(encoded, one_process(images, grids), strict=True):
        assert torch.equal(rows, expected)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 50])
def test_e1_tensor_workers_equal_one_process(number: int, tensor_pool: WorkerPool, one_process: Encode) -> None:
    grids = FIFTY[:number]
    images = random_images(grids)
    encoded = rows_of(tensor_pool.encode(images, grids))
    for rows, expected in zip(encoded, one_process(images, grids), strict=True):
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_rows_come_back_in_order_for_every_order_of_five_images(data_pool: WorkerPool, one_process: Encode) -> None:
    grids = SIZES[:5]
    images = random_images(grids)
    expected = one_process(images, grids)
    for order in permutations(range(5)):
        encoded = rows_of(data_pool.encode([images[index] for index in order], [grids[index] for index in order]))
        assert all(torch.equal(rows, expected[index]) for rows, index in zip(encoded, order, strict=True)), order


def test_changing_one_image_changes_no_row_of_another(data_pool: WorkerPool) -> None:
    grids = SIZES[:4]
    images = random_images(grids)
    before = rows_of(data_pool.encode(images, grids))
    images[2] = 255 - images[2]
    after = rows_of(data_pool.encode(images, grids))
    assert [torch.equal(one, other) for one, other in zip(before, after, strict=True)] == [True, True, False, True]


def test_rows_belong_to_the_caller(data_pool: WorkerPool) -> None:
    images, grids = random_images(SIZES[:3]), SIZES[:3]
    first = rows_of(data_pool.encode(images, grids))
    kept = [rows.clone() for rows in first]
    rows_of(data_pool.encode(random_images(grids, seed=1), grids))
    assert all(torch.equal(rows, copy) for rows, copy in zip(first, kept, strict=True))


def test_the_work_log_tells_forwards_of_all_workers(data_pool: WorkerPool) -> None:
    list(data_pool.work_log.drain())
    data_pool.encode(random_images(SIZES[:3]), SIZES[:3])
    work = list(data_pool.work_log.drain())
    forwards = [forward for done in work for forward in done.forwards]
    assert sorted(forward.num_patches for forward in forwards) == [4, 96, 600]
    assert all(forward.num_images == 1 for forward in forwards)
    assert all(done.milliseconds > 0 for done in work)


def test_a_start_that_cannot_be_is_a_config_error(tiny_k25: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"4 attention heads .* 3 tensor workers"),
        started_pool(vision_options(tiny_k25, "tensor", 3)),
    ):
        pytest.fail("it started")
