# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

from kimi_triton.demo.curriculum import FREEING, GROWING, LOOKING_UP, exercises, pictures
from kimi_triton.demo.questions import CONTENTS
from kimi_triton.demo.scenes import MAX_SHAPES


def longest(step: int) -> int:
    """Digits of the longest number among the pictures of a few steps."""
    shown = [picture for seed in range(6) for picture in pictures(step, random.Random(seed))]
    return max(
        1 + mark.place
        for picture in shown
        for mark in picture.marks
        if mark.digit is not None and mark.place is not None
    )


def test_numbers_grow_up_to_what_is_examined() -> None:
    assert longest(0) == 1
    assert longest(GROWING // 2) == 4
    assert longest(GROWING + FREEING) == 8


def test_digits_fill_their_cells_first() -> None:
    first = [picture for picture in pictures(0, random.Random(0)) if picture.marks[0].digit is not None]
    numbers = [picture for picture in first if picture.marks[0].place is not None]
    assert numbers
    assert all(mark.x % 28 == mark.y % 28 == 14 for picture in numbers for mark in picture.marks)


def test_the_language_model_begins_with_simple_scenes_alone() -> None:
    asked = [exercise for seed in range(3) for exercise in exercises(0, random.Random(seed))]
    assert {exercise.kind for exercise in asked} == {"shapes"}
    questions = [text for e in asked for text, _ in ((e.question, e.answer), *e.more)]
    assert not [text for text in questions if text == CONTENTS or text.startswith("Where")]
    assert max(len(e.pictures[0].marks) for e in asked) == 4


def test_then_it_is_asked_all_that_is_examined() -> None:
    asked = [exercise for seed in range(8) for exercise in exercises(LOOKING_UP, random.Random(seed))]
    assert {exercise.kind for exercise in asked} == {"numbers", "shapes", "multi_image"}
    assert max(len(e.pictures[0].marks) for e in asked if e.kind == "shapes") == MAX_SHAPES
    assert {len(e.answer) for e in asked if e.kind == "numbers"} == set(range(1, 9))
