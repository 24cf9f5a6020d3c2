# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import pytest
from sklearn.datasets import load_digits

from kimi_triton.demo.scans import load_scans, pick_scans


def numbers(part: str) -> set[int]:
    return {scan.number for group in load_scans(part) for scan in group}  # type: ignore[arg-type]


def test_the_parts_are_disjoint_and_together_all_scans() -> None:
    assert not numbers("train") & numbers("held_out")
    assert numbers("train") | numbers("held_out") == set(range(1797))


def test_no_held_out_scan_has_a_twin_in_training() -> None:
    training = {scan.ink.tobytes() for group in load_scans("train") for scan in group}
    assert not any(scan.ink.tobytes() in training for group in load_scans("held_out") for scan in group)


def test_a_fifth_of_each_digit_is_held_out() -> None:
    for train, held_out in zip(load_scans("train"), load_scans("held_out"), strict=True):
        assert len(held_out) == (len(train) + len(held_out)) // 5


def test_the_split_is_drawn_with_a_fixed_seed() -> None:
    assert [scan.number for scan in load_scans("held_out")[0]][:3] == [1615, 286, 1435]


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_scans_show_what_they_say(part: str) -> None:
    digits = load_digits()
    for digit, group in enumerate(load_scans(part)):  # type: ignore[arg-type]
        for scan in group:
            assert scan.digit == digit == digits.target[scan.number]
            assert abs(scan.ink / 255 * 16 - digits.images[scan.number]).max() < 0.1


def test_picked_scans_spell_the_number() -> None:
    assert [scan.digit for scan in pick_scans(random.Random(0), "train", "90210")] == [9, 0, 2, 1, 0]
