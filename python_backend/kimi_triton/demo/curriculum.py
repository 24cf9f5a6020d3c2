# SPDX-License-Identifier: Apache-2.0
"""What training shows when: digits that each fill a 28x28 cell, then free ones, then scenes and several images.

Digits placed freely from the start are never learned in the time there is; digits that fill a cell are, in minutes,
and what was learned there carries over when size, place and lines are set free little by little.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kimi_triton.demo.numbers import draw_page
from kimi_triton.demo.pictures import Picture
from kimi_triton.demo.questions import (
    MAX_DIGITS,
    MAX_SHAPES,
    Exercise,
    multi_image_exercise,
    number_exercise,
    scene_exercise,
)
from kimi_triton.demo.scenes import draw_scene

GROWING = 500  # steps in which numbers grow from 1 to 8 digits
FREEING = 900  # steps after that in which the layout is set free
SCENES_FROM, MULTI_IMAGE_FROM = 150, 800
LOOKING_UP = 350  # first steps of the language model's own phase, with simple questions about scenes alone
READING = 1600  # steps of that phase after which numbers are more frequent than scenes
MORE_SHAPES = 150  # steps after which scenes may have one shape more

NUM_PAGES = 16  # in each batch
SHAPES_FROM = 1875  # step from which half of the pages show shapes, not a quarter, and scenes are more frequent
PAGE_SIDES = (112, 140, 168, 196)  # pixels
CROWD = 12  # shapes on a page


@dataclass(frozen=True, slots=True)
class Stage:
    """How hard the exercises of one step are."""

    max_digits: int
    freedom: float
    warp: float
    max_shapes: int
    has_simple_scenes: bool
    scenes_share: float
    multi_image_share: float
    digit_pages: int
    shape_pages: int

    @classmethod
    def of_step(cls, step: int, tower_steps: int) -> Stage:
        """From step `tower_steps` on only the language model learns.

        It begins with simple questions about scenes alone: what it learns there in 200 steps, to look up what a
        question names, it does not learn at all among numbers.
        """
        own_step = step - tower_steps  # of the language model's own phase
        is_looking_up = 0 <= own_step < LOOKING_UP
        grown = min(1.0, step / GROWING)
        free = min(1.0, max(0.0, (step - GROWING) / FREEING))
        scenes_from = tower_steps if own_step >= 0 else SCENES_FROM
        if own_step >= READING:
            scenes_share, digit_pages, shape_pages = 0.3, 0, 0
        elif own_step >= LOOKING_UP:
            scenes_share, digit_pages, shape_pages = 0.5, 0, 0
        elif is_looking_up:
            scenes_share, digit_pages, shape_pages = 1.0, 0, 0
        elif step >= SHAPES_FROM:
            scenes_share, digit_pages, shape_pages = 0.45, NUM_PAGES // 2, NUM_PAGES // 2
        else:
            scenes_share, digit_pages, shape_pages = 0.38, 3 * NUM_PAGES // 4, NUM_PAGES // 4
        return cls(
            max_digits=1 + int((MAX_DIGITS - 1) * grown),
            freedom=free,
            warp=0.3 + 0.4 * grown,
            max_shapes=4 if is_looking_up else max(1, min(MAX_SHAPES, 2 + (step - scenes_from) // MORE_SHAPES)),
            has_simple_scenes=is_looking_up,
            scenes_share=scenes_share if step >= SCENES_FROM else 0.0,
            multi_image_share=0.17 if step >= MULTI_IMAGE_FROM else 0.0,
            digit_pages=digit_pages,
            shape_pages=shape_pages,
        )

    def pages(self, rng: random.Random) -> list[Picture]:
        """Pictures without a question, crowded with digits or shapes: only the hints learn from them."""
        sides = [(rng.choice(PAGE_SIDES), rng.choice(PAGE_SIDES)) for _ in range(self.digit_pages + self.shape_pages)]
        digits = [draw_page(rng, "train", *size, self.warp * rng.random()) for size in sides[: self.digit_pages]]
        return digits + [draw_scene(rng, CROWD, size) for size in sides[self.digit_pages :]]

    def exercise(self, rng: random.Random) -> Exercise:
        """One exercise from the training part of the scans."""
        draw = rng.random()
        if draw < self.scenes_share:
            return scene_exercise(rng, self.max_shapes, num_more=7, is_simple=self.has_simple_scenes)
        if draw < self.scenes_share + self.multi_image_share:
            return multi_image_exercise(rng, "train", self.warp, num_more=3)
        freedom = self.freedom * rng.random() ** 0.3
        return number_exercise(rng, "train", self.max_digits, freedom, self.warp * rng.random())
