# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.vision.packing import check_max_patches, pack_images


@given(st.lists(st.integers(4, 500), max_size=60), st.integers(1, 1000))
def test_packs_cover_all_images_in_order_and_respect_the_budget(sizes: list[int], budget: int) -> None:
    packs = pack_images(sizes, budget)
    assert [index for pack in packs for index in pack] == list(range(len(sizes)))
    for pack in packs:
        assert len(pack) == 1 or sum(sizes[index] for index in pack) <= budget
    for left, right in pairwise(packs):
        assert sum(sizes[index] for index in left) + sizes[right.start] > budget


def test_an_oversize_image_is_alone() -> None:
    assert pack_images([4, 4, 900, 4], 100) == [range(2), range(2, 3), range(3, 4)]


def test_no_images_need_no_forward() -> None:
    assert pack_images([], 100) == []


def test_d2_five_hundred_images_are_cut_into_bounded_forwards() -> None:
    packs = pack_images([256] * 500, 16_384)
    assert [len(pack) for pack in packs] == [64] * 7 + [52]


def test_d2_a_forward_stays_below_two_to_the_31_elements(k25_checkpoint: Checkpoint) -> None:
    released = replace(k25_checkpoint.config.vision, hidden_size=1152, num_attention_heads=16, intermediate_size=4304)
    check_max_patches((2**31 - 1) // 4304, released)
    for wrong in (2**31 // 4304 + 1, 0, -1):
        with pytest.raises(ConfigError, match=f"max_patches_per_forward is {wrong}, expected 1 to 498950"):
            check_max_patches(wrong, released)
