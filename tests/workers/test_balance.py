# SPDX-License-Identifier: Apache-2.0
"""Images over workers, against the worked examples of public implementations and the rule itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.workers.balance import assign_images


@pytest.mark.parametrize(
    ("num_patches", "num_workers", "assigned", "loads"),
    [
        ([1000, 100, 200, 50], 2, [[0], [2, 1, 3]], [1000, 350]),
        ([100, 100, 100], 4, [[0], [1], [2], []], [100, 100, 100, 0]),
        ([16, 24, 6, 4], 2, [[1], [0, 2, 3]], [24, 26]),
        ([], 3, [[], [], []], [0, 0, 0]),
    ],
)
def test_worked_examples(num_patches: list[int], num_workers: int, assigned: list[list[int]], loads: list[int]) -> None:
    result = assign_images(num_patches, [0] * num_workers)
    assert result == assigned
    assert [sum(num_patches[image] for image in images) for images in result] == loads


def test_work_that_is_not_done_yet_counts() -> None:
    assert assign_images([10, 10], [100, 0]) == [[], [0, 1]]


@given(st.lists(st.integers(4, 20_000), max_size=40), st.integers(1, 8))
def test_every_image_is_assigned_once_and_no_worker_could_have_done_with_less(sizes: list[int], workers: int) -> None:
    assigned = assign_images(sizes, [0] * workers)
    assert sorted(image for images in assigned for image in images) == list(range(len(sizes)))
    loads = [sum(sizes[image] for image in images) for images in assigned]
    for images, load in zip(assigned, loads, strict=True):
        if images:  # its last image went to it because no other was less loaded
            assert load - sizes[images[-1]] <= min(loads)
