# SPDX-License-Identifier: Apache-2.0
"""What every drawn picture has: a canvas, paper, marks that say what lies where."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from PIL import Image

RGB = tuple[int, int, int]

CELL = 28  # pixels on a side of what becomes one image token
MAX_SIDE = 280
MAX_AREA = 32_000  # about 41 tokens; keeps training fast
NOISE = np.random.default_rng(0).normal(0, 1, (2 * MAX_SIDE, 2 * MAX_SIDE, 1))


@dataclass(frozen=True, slots=True)
class Mark:
    """Something drawn with its centre at (x, y) pixels: a digit with its place in the number, or a shape."""

    x: float
    y: float
    digit: int | None = None
    place: int | None = None  # 0 is the first digit of the number
    shape: str | None = None
    colour: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An RGB image and what is in it."""

    image: Image.Image
    marks: tuple[Mark, ...]
    is_dark: bool


def jittered(rng: random.Random, colour: RGB, amount: int) -> RGB:
    """`colour` with each channel moved by up to `amount`."""
    red, green, blue = (min(255, max(0, value + rng.randint(-amount, amount))) for value in colour)
    return red, green, blue


def paper(rng: random.Random, is_dark: bool) -> RGB:
    """A light or a dark paper, slightly tinted."""
    level = rng.randint(16, 56) if is_dark else rng.randint(200, 245)
    return jittered(rng, (level, level, level), 10)


def with_noise(rng: random.Random, image: Image.Image, deviation: float) -> Image.Image:
    """Grain of the given standard deviation, in levels of 255."""
    if deviation <= 0:
        return image
    left, top = rng.randint(0, MAX_SIDE), rng.randint(0, MAX_SIDE)
    grain = NOISE[top : top + image.height, left : left + image.width] * deviation
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))
