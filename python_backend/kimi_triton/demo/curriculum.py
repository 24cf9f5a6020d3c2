# SPDX-License-Identifier: Apache-2.0
"""What training shows when. First pictures to the vision tower: digits that each fill a 28x28 cell, then free ones.
Then questions to the language model: simple ones about scenes, then all.

Digits placed freely from the start are never learned in the time there is; digits that fill a cell are, in minutes,
and what was learned there carries over when size, place and lines are set free little by little.
"""

from __future__ import annotations

import random

from kimi_triton.demo.numbers import MAX_DIGITS, draw_number, draw_page
from kimi_triton.demo.pictures import Picture
from kimi_triton.demo.questions import (
    Exercise,
    any_number,
    multi_image_exercise,
    number_exercise,
    scene_exercise,
)
from kimi_triton.demo.scans import pick_scans
from kimi_triton.demo.scenes import MAX_SHAPES, draw_scene

# Pictures of one step of the vision tower.
NUM_NUMBERS, NUM_SCENES, DIGIT_PAGES, SHAPE_PAGES = 14, 8, 9, 4
PAGE_SIDES = (112, 140, 168, 196)  # pixels
CROWD = 12  # shapes on a page
GROWING = 400  # steps in which numbers grow from 1 to 8 digits
FREEING = 800  # steps after that in which the layout is set free

EXERCISES = 16  # of one step of the language model
LOOKING_UP = 350  # its first steps, with simple questions about scenes alone
SCENES, MULTI_IMAGE = 0.52, 0.22  # shares of the exercises after that; the rest are numbers


def pictures(step: int, rng: random.Random) -> list[Picture]:
    """What the tower sees at a step, drawn with the training part of the scans. Long numbers and crowded scenes are
    more frequent than in the exam: where a digit stands among many is what is learned last."""
    grown = min(1.0, step / GROWING)
    free = min(1.0, max(0.0, (step - GROWING) / FREEING))
    warp, longest = 0.3 + 0.65 * grown, 1 + int((MAX_DIGITS - 1) * grown)
    shown = []
    for _ in range(NUM_NUMBERS):
        scans = pick_scans(rng, "train", any_number(rng, _mostly_many(rng, longest)))
        shown.append(draw_number(rng, scans, free * rng.random() ** 0.3, warp * rng.random()))
    shown += [draw_scene(rng, _mostly_many(rng, MAX_SHAPES)) for _ in range(NUM_SCENES)]
    sides = [(rng.choice(PAGE_SIDES), rng.choice(PAGE_SIDES)) for _ in range(DIGIT_PAGES + SHAPE_PAGES)]
    shown += [draw_page(rng, "train", *size, warp * rng.random()) for size in sides[:DIGIT_PAGES]]
    return shown + [draw_scene(rng, CROWD, size) for size in sides[DIGIT_PAGES:]]


def exercises(step: int, rng: random.Random) -> list[Exercise]:
    """What the language model is asked at a step of its own.

    It begins with simple questions about scenes alone: what it learns there in 200 steps, to look up what a question
    names, it does not learn at all among numbers.
    """
    if step < LOOKING_UP:
        return [scene_exercise(rng, max_shapes=4, num_more=7, is_simple=True) for _ in range(EXERCISES)]
    return [_exercise(rng) for _ in range(EXERCISES)]


def _exercise(rng: random.Random) -> Exercise:
    draw, warp = rng.random(), 0.7 * rng.random()
    if draw < SCENES:
        return scene_exercise(rng, num_more=7)
    if draw < SCENES + MULTI_IMAGE:
        return multi_image_exercise(rng, "train", warp, num_more=3)
    return number_exercise(rng, "train", rng.random() ** 0.3, warp, num_digits=_mostly_many(rng, MAX_DIGITS))


def _mostly_many(rng: random.Random, largest: int) -> int:
    """1 to `largest`, half of the time the larger one of two."""
    count = rng.randint(1, largest)
    return max(count, rng.randint(1, largest)) if rng.random() < 0.5 else count
