# SPDX-License-Identifier: Apache-2.0
"""Drawn pictures hold what their marks say."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from kimi_triton.demo.numbers import draw_number, draw_page
from kimi_triton.demo.pictures import CELL, MAX_SIDE, Picture
from kimi_triton.demo.scans import pick_scans
from kimi_triton.demo.scenes import COLOURS, draw_scene


def number(seed: int, freedom: float, text: str = "40713") -> Picture:
    rng = random.Random(seed)
    return draw_number(rng, pick_scans(rng, "train", text), freedom, warp=0.5)


def contrast(picture: Picture, x: float, y: float, reach: int) -> float:
    """Spread of brightness in the square around (x, y)."""
    pixels = np.asarray(picture.image.convert("L"), float)
    part = pixels[max(0, int(y) - reach) : int(y) + reach, max(0, int(x) - reach) : int(x) + reach]
    return float(part.max() - part.min())


def test_without_freedom_each_digit_fills_one_cell() -> None:
    picture = number(0, freedom=0.0)
    assert picture.image.size == (5 * CELL, CELL)
    assert [(mark.x, mark.y) for mark in picture.marks] == [(CELL * (place + 0.5), CELL / 2) for place in range(5)]


@pytest.mark.parametrize("seed", range(20))
def test_digits_lie_inside_in_reading_order(seed: int) -> None:
    picture = number(seed, freedom=1.0)
    assert [mark.digit for mark in picture.marks] == [4, 0, 7, 1, 3]
    assert [mark.place for mark in picture.marks] == list(range(5))
    for mark in picture.marks:
        assert 8 < mark.x < picture.image.width - 8
        assert 8 < mark.y < picture.image.height - 8
        assert contrast(picture, mark.x, mark.y, 10) > 60
    for before, after in zip(picture.marks, picture.marks[1:], strict=False):
        assert after.x > before.x + 12 or after.y > before.y + 12


def test_free_canvases_have_many_sizes_and_both_papers() -> None:
    pictures = [number(seed, freedom=1.0) for seed in range(100)]
    sizes = {picture.image.size for picture in pictures}
    ratios = [width / height for width, height in sizes]
    assert len(sizes) > 90
    assert min(ratios) < 0.8
    assert max(ratios) > 4
    assert sum(width % CELL > 0 or height % CELL > 0 for width, height in sizes) > 90
    assert max(map(max, sizes)) <= MAX_SIDE
    assert 30 < sum(picture.is_dark for picture in pictures) < 70
    assert {len({round(mark.y / 20) for mark in picture.marks}) > 1 for picture in pictures} == {True, False}


@pytest.mark.parametrize("seed", range(10))
def test_a_page_is_full_of_digits_apart(seed: int) -> None:
    picture = draw_page(random.Random(seed), "train", 168, 140, warp=1.0)
    assert picture.image.size == (168, 140)
    assert len(picture.marks) >= 6
    for index, one in enumerate(picture.marks):
        assert one.place is None
        assert contrast(picture, one.x, one.y, 10) > 60
        assert all(np.hypot(one.x - two.x, one.y - two.y) > 14 for two in picture.marks[:index])


@pytest.mark.parametrize("seed", range(20))
def test_shapes_show_their_colours_and_stay_apart(seed: int) -> None:
    picture = draw_scene(random.Random(seed), 6)
    pixels = np.asarray(picture.image, int)
    for mark in picture.marks:
        red, green, blue = COLOURS[str(mark.colour)]
        assert np.abs(pixels[int(mark.y), int(mark.x)] - (red, green, blue)).max() < 60
    for index, one in enumerate(picture.marks):
        assert all(np.hypot(one.x - two.x, one.y - two.y) > 22 for two in picture.marks[:index])
        assert min(one.x, one.y) > 11
    assert len(picture.marks) <= 6
    assert max(mark.x for mark in picture.marks) < picture.image.width - 11


@pytest.mark.parametrize("seed", range(60))
def test_shapes_with_places_lie_in_reading_order(seed: int) -> None:
    marks = draw_scene(random.Random(seed), 6).marks
    if marks[0].place is None:
        assert all(mark.place is None for mark in marks)
        return
    assert [mark.place for mark in marks] == list(range(len(marks)))
    for before, after in pairwise(marks):
        assert after.x > before.x or after.y > before.y
    rows = 1 + sum(after.x < before.x for before, after in pairwise(marks))
    assert rows <= 2


def test_half_of_the_scenes_have_an_order() -> None:
    ordered = [draw_scene(random.Random(seed), 6).marks[0].place is not None for seed in range(100)]
    assert 30 < sum(ordered) < 70


def test_all_colours_and_shapes_occur() -> None:
    marks = [mark for seed in range(60) for mark in draw_scene(random.Random(seed), 6).marks]
    assert {mark.colour for mark in marks} == set(COLOURS)
    assert min(Counter(mark.shape for mark in marks).values()) > 20
