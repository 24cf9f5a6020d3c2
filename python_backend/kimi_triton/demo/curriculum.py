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
SCENES_FROM, MULTI_IMAGE_FROM = 300, 800

DIGIT_PAGES, SHAPE_PAGES = 12, 4  # in each batch
PAGE_SIDES = (112, 140, 168, 196)  # pixels
CROWD = 12  # shapes on a page


@dataclass(frozen=True, slots=True)
class Stage:
    """How hard the exercises of one step are."""

    max_digits: int
    freedom: float
    warp: float
    max_shapes: int
    scenes_share: float
    multi_image_share: float
    has_pages: bool

    @classmethod
    def of_step(cls, step: int, tower_is_done: bool = False) -> Stage:
        """`tower_is_done`: only the language model still learns, mostly from scenes, which it finds hardest."""
        grown = min(1.0, step / GROWING)
        free = min(1.0, max(0.0, (step - GROWING) / FREEING))
        return cls(
            max_digits=1 + int((MAX_DIGITS - 1) * grown),
            freedom=free,
            warp=0.3 + 0.4 * grown,
            max_shapes=max(1, min(MAX_SHAPES, 1 + (step - SCENES_FROM) // 150)),
            scenes_share=(0.55 if tower_is_done else 0.35) if step >= SCENES_FROM else 0.0,
            multi_image_share=0.2 if step >= MULTI_IMAGE_FROM else 0.0,
            has_pages=not tower_is_done,
        )

    def pages(self, rng: random.Random) -> list[Picture]:
        """Pictures without a question, crowded with digits or shapes: only the hints learn from them."""
        if not self.has_pages:
            return []
        sides = [(rng.choice(PAGE_SIDES), rng.choice(PAGE_SIDES)) for _ in range(DIGIT_PAGES + SHAPE_PAGES)]
        digits = [draw_page(rng, "train", *size, self.warp * rng.random()) for size in sides[:DIGIT_PAGES]]
        return digits + [draw_scene(rng, CROWD, size) for size in sides[DIGIT_PAGES:]]

    def exercise(self, rng: random.Random) -> Exercise:
        """One exercise from the training part of the scans."""
        draw = rng.random()
        if draw < self.scenes_share:
            return scene_exercise(rng, self.max_shapes, num_more=5)
        if draw < self.scenes_share + self.multi_image_share:
            return multi_image_exercise(rng, "train", self.warp, num_more=3)
        freedom = self.freedom * rng.random() ** 0.3
        return number_exercise(rng, "train", self.max_digits, freedom, self.warp * rng.random())
