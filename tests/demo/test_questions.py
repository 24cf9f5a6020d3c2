# SPDX-License-Identifier: Apache-2.0
"""Answers follow from what was drawn."""

from __future__ import annotations

import random
import re

import pytest

from kimi_triton.demo.exam import held_out_exercises, marks
from kimi_triton.demo.questions import CONTENTS, ORDINALS, Exercise, multi_image_exercise, scene_exercise
from kimi_triton.demo.scans import load_scans

EXAM = held_out_exercises(200)


def shown_number(exercise: Exercise, index: int) -> str:
    return "".join(str(mark.digit) for mark in exercise.pictures[index].marks)


def test_an_exam_is_the_same_every_time_and_has_all_kinds() -> None:
    again = held_out_exercises(200)
    assert [(e.question, e.answer) for e in EXAM] == [(e.question, e.answer) for e in again]
    assert all(
        one.image.tobytes() == two.image.tobytes()
        for e, f in zip(EXAM, again, strict=True)
        for one, two in zip(e.pictures, f.pictures, strict=True)
    )
    kinds = [e.kind for e in EXAM]
    assert (kinds.count("numbers"), kinds.count("shapes"), kinds.count("multi_image")) == (100, 50, 50)


def test_numbers_of_an_exam_have_one_to_eight_digits() -> None:
    numbers = [e for e in EXAM if e.kind == "numbers"]
    assert all(e.answer == shown_number(e, 0) for e in numbers)
    assert {len(e.answer) for e in numbers} == set(range(1, 9))


def test_an_exam_uses_held_out_scans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def spy(part: str) -> object:
        used.append(part)
        return load_scans(part)  # type: ignore[arg-type]

    monkeypatch.setattr("kimi_triton.demo.scans.load_scans", spy)
    held_out_exercises(40)
    assert set(used) == {"held_out"}


@pytest.mark.parametrize("seed", range(40))
def test_questions_about_several_images(seed: int) -> None:
    exercise = multi_image_exercise(random.Random(seed), "train")
    numbers = [shown_number(exercise, index) for index in range(len(exercise.pictures))]
    assert len(numbers) in (2, 3)
    if match := re.fullmatch(r"Read the (\w+) image\.", exercise.question):
        assert exercise.answer == numbers[ORDINALS.index(match[1])]
    else:
        largest = max(range(len(numbers)), key=lambda index: int(numbers[index]))
        assert exercise.answer == f"{', '.join(numbers)}: the {ORDINALS[largest]}"
        assert ("larger" in exercise.question) == (len(numbers) == 2)


@pytest.mark.parametrize("seed", range(60))
def test_questions_about_scenes(seed: int) -> None:
    exercise = scene_exercise(random.Random(seed))
    (picture,) = exercise.pictures
    shapes = [(str(mark.colour), str(mark.shape)) for mark in picture.marks]
    question, answer = exercise.question, exercise.answer
    if match := re.fullmatch(r"How many (\w+)s are there\?", question):
        wanted = match[1]
        assert int(answer) == sum(wanted in ("shape", shape) for _, shape in shapes)
    elif match := re.fullmatch(r"How many (\w+) shapes are there\?", question):
        assert int(answer) == sum(colour == match[1] for colour, _ in shapes)
    elif match := re.fullmatch(r"What colour is the (\w+)\?", question):
        assert [colour for colour, shape in shapes if shape == match[1]] == [answer]
    elif match := re.fullmatch(r"What shape is (\w+)\?", question):
        assert [shape for colour, shape in shapes if colour == match[1]] == [answer]
    elif match := re.fullmatch(r"Where is the (\w+)\?", question):
        (mark,) = [mark for mark in picture.marks if mark.shape == match[1]]
        height, width = picture.image.height, picture.image.width
        assert (mark.y < 0.4 * height, mark.x < 0.4 * width) == (answer.startswith("top"), answer.endswith("left"))
        assert (mark.y > 0.6 * height, mark.x > 0.6 * width) == (answer.startswith("bottom"), answer.endswith("right"))
    else:
        assert question == CONTENTS
        assert answer == ", ".join(f"{colour} {shape}" for colour, shape in shapes)
        assert [mark.place for mark in picture.marks] == list(range(len(shapes)))


def test_marks_count_whole_answers_and_digits_in_place() -> None:
    exercises = [e for e in EXAM if e.kind == "numbers" and len(e.answer) == 4][:2]
    first, second = (e.answer for e in exercises)
    wrong = second[:3] + str((int(second[3]) + 1) % 10)
    assert marks(exercises, [first, second]) == {"digits": 1.0, "numbers": 1.0}
    assert marks(exercises, [first, wrong]) == {"digits": 0.875, "numbers": 0.5}
    assert marks(exercises, ["", second + "0"]) == {"digits": 0.5, "numbers": 0.0}


def test_further_questions_of_training_are_harder() -> None:
    more = [text for seed in range(40) for text, _ in scene_exercise(random.Random(seed), num_more=7).more]
    looked_up = [text for text in more if text.startswith(("Where", "What colour", "What shape"))]
    assert len(looked_up) > 0.5 * len(more)
