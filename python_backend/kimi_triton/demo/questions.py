# SPDX-License-Identifier: Apache-2.0
"""Questions about drawn pictures, with the answers: one number, a scene, or two or three images in one prompt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kimi_triton.demo.numbers import MAX_DIGITS, draw_number
from kimi_triton.demo.pictures import Picture
from kimi_triton.demo.scans import Part, pick_scans
from kimi_triton.demo.scenes import COLOURS, MAX_SHAPES, SHAPES, draw_scene

Kind = Literal["numbers", "shapes", "multi_image"]
ORDINALS = ("first", "second", "third")
READ_NUMBER = ("What number is this?", "Read the number.", "What number is written here?")
LARGER = "Which image shows the larger number?"
LARGEST = "Which image shows the largest number?"
CONTENTS = "What is in this picture?"
MIDDLE = 0.1  # nothing is asked about shapes nearer to the middle, as a share of the picture's side


Asker = Callable[[random.Random, Picture], tuple[str, str]]  # question and answer


@dataclass(frozen=True, slots=True, eq=False)
class Exercise:
    """A question about pictures and the answer a perfect model gives."""

    kind: Kind
    pictures: tuple[Picture, ...]
    question: str
    answer: str
    more: tuple[tuple[str, str], ...] = ()  # further questions about the same pictures, and their answers


def number_exercise(
    rng: random.Random, part: Part, freedom: float = 1.0, warp: float = 0.0, num_digits: int | None = None
) -> Exercise:
    """Read a number of `num_digits`, or of 1 to 8 digits."""
    number = any_number(rng, num_digits or rng.randint(1, MAX_DIGITS))
    picture = draw_number(rng, pick_scans(rng, part, number), freedom, warp)
    return Exercise("numbers", (picture,), rng.choice(READ_NUMBER), number)


def multi_image_exercise(rng: random.Random, part: Part, warp: float = 0.0, num_more: int = 0) -> Exercise:
    """Two or three numbers: read one of them, or find the largest."""
    numbers = [any_number(rng, rng.randint(1, 3)) for _ in range(rng.choice((2, 3)))]
    pictures = tuple(draw_number(rng, pick_scans(rng, part, number), 0.7, warp) for number in numbers)
    (question, answer), *more = [_about_numbers(rng, numbers) for _ in range(1 + num_more)]
    return Exercise("multi_image", pictures, question, answer, tuple(more))


def scene_exercise(
    rng: random.Random, max_shapes: int = MAX_SHAPES, num_more: int = 0, is_simple: bool = False
) -> Exercise:
    """Count shapes, name a colour or a shape, and unless `is_simple` name all of them, or say where one lies.

    What is learned last is more frequent among the `num_more` questions.
    """
    picture = draw_scene(rng, rng.randint(1, max_shapes))
    kinds: tuple[Asker, ...] = (_count_all, _count_shape, _count_colour, _colour_of, _shape_of)
    if not is_simple:
        kinds += (_contents, _contents, _where, _where)
    question, answer = rng.choice(kinds)(rng, picture)
    if not is_simple:
        kinds += HARD
    more = tuple(rng.choice(kinds)(rng, picture) for _ in range(num_more))
    return Exercise("shapes", (picture,), question, answer, more)


def _about_numbers(rng: random.Random, numbers: list[str]) -> tuple[str, str]:
    values = [int(number) for number in numbers]
    if values.count(max(values)) == 1 and rng.random() < 0.5:
        question = LARGER if len(numbers) == 2 else LARGEST
        return question, f"{', '.join(numbers)}: the {ORDINALS[values.index(max(values))]}"
    index = rng.randrange(len(numbers))
    return f"Read the {ORDINALS[index]} image.", numbers[index]


def any_number(rng: random.Random, length: int) -> str:
    """`length` digits; a longer number does not begin with 0."""
    return str(rng.randrange(10 ** (length - 1), 10**length)) if length > 1 else str(rng.randrange(10))


def _contents(rng: random.Random, picture: Picture) -> tuple[str, str]:
    if any(mark.place is None for mark in picture.marks):
        return _count_colour(rng, picture)  # shapes that lie anywhere have no order to list them in
    return CONTENTS, ", ".join(f"{mark.colour} {mark.shape}" for mark in picture.marks)


def _count_all(rng: random.Random, picture: Picture) -> tuple[str, str]:  # noqa: ARG001
    return "How many shapes are there?", str(len(picture.marks))


def _count_shape(rng: random.Random, picture: Picture) -> tuple[str, str]:
    shape = rng.choice((*SHAPES, *(str(mark.shape) for mark in picture.marks)))
    return f"How many {shape}s are there?", str(sum(mark.shape == shape for mark in picture.marks))


def _count_colour(rng: random.Random, picture: Picture) -> tuple[str, str]:
    colour = rng.choice((*COLOURS, *(str(mark.colour) for mark in picture.marks)))
    return f"How many {colour} shapes are there?", str(sum(mark.colour == colour for mark in picture.marks))


def _colour_of(rng: random.Random, picture: Picture) -> tuple[str, str]:
    shapes = Counter(mark.shape for mark in picture.marks)
    alone = [mark for mark in picture.marks if shapes[mark.shape] == 1]
    if not alone:
        return _count_shape(rng, picture)
    mark = rng.choice(alone)
    return f"What colour is the {mark.shape}?", str(mark.colour)


def _shape_of(rng: random.Random, picture: Picture) -> tuple[str, str]:
    colours = Counter(mark.colour for mark in picture.marks)
    alone = [mark for mark in picture.marks if colours[mark.colour] == 1]
    if not alone:
        return _count_colour(rng, picture)
    mark = rng.choice(alone)
    return f"What shape is {mark.colour}?", str(mark.shape)


def _where(rng: random.Random, picture: Picture) -> tuple[str, str]:
    """In which quarter of the picture a shape lies."""
    shapes = Counter(mark.shape for mark in picture.marks)
    width, height = picture.image.size
    clear = [
        (mark.shape, mark.x / width, mark.y / height)
        for mark in picture.marks
        if shapes[mark.shape] == 1 and min(abs(mark.x / width - 0.5), abs(mark.y / height - 0.5)) > MIDDLE
    ]
    if not clear:
        return _colour_of(rng, picture)
    shape, x, y = rng.choice(clear)
    return f"Where is the {shape}?", f"{'top' if y < 0.5 else 'bottom'} {'left' if x < 0.5 else 'right'}"


HARD: tuple[Asker, ...] = (_colour_of, _colour_of, _shape_of, _shape_of, _where, _where, _where, _where)


def vocabulary() -> list[str]:
    """Every text that questions, answers and the prompt around them are made of."""
    texts = [*READ_NUMBER, LARGER, LARGEST, CONTENTS, "How many shapes are there?", "1, 2: the first", "user"]
    texts += ["assistant", "system", "image", "\n"]
    texts += [f"Read the {ordinal} image. the {ordinal}" for ordinal in ORDINALS]
    about_shapes = "How many {0}s are there? What colour is the {0}? What shape is red? {0}"
    texts += [about_shapes.format(shape) for shape in SHAPES]
    texts += ["Where is the shape? top left, bottom right", *(f"1 {shape}, 2 {shape}s" for shape in SHAPES)]
    texts += [f"How many {colour} shapes? 1 {colour}" for colour in COLOURS] + list(COLOURS) + list(SHAPES)
    return texts
