# SPDX-License-Identifier: Apache-2.0
"""Draw scenes of coloured shapes that do not touch each other."""

from __future__ import annotations

import math
import random

from PIL import Image, ImageDraw

from kimi_triton.demo.pictures import MAX_AREA, RGB, Mark, Picture, jittered, paper, with_noise

SHAPES = ("circle", "square", "triangle", "star")
COLOURS: dict[str, RGB] = {
    "red": (215, 35, 35),
    "green": (35, 160, 60),
    "blue": (40, 75, 220),
    "yellow": (235, 205, 35),
    "purple": (150, 50, 180),
    "black": (12, 12, 12),  # on light paper only
    "white": (250, 250, 250),  # on dark paper only
}
MIN_RADIUS, MAX_RADIUS = 11, 24
TRIES = 200


def draw_scene(rng: random.Random, count: int, size: tuple[int, int] | None = None) -> Picture:
    """Up to `count` shapes (fewer when they do not fit) on a canvas of `size`, or of any size and aspect ratio."""
    width, height = size or _any_size(rng)
    is_dark = rng.random() < 0.5
    image = Image.new("RGB", (width, height), paper(rng, is_dark))
    pen = ImageDraw.Draw(image)
    colours = [colour for colour in COLOURS if colour != ("black" if is_dark else "white")]
    marks: list[Mark] = []
    for x, y, radius in _places(rng, width, height, count):
        shape, colour = rng.choice(SHAPES), rng.choice(colours)
        _draw(pen, rng, shape, x, y, radius, jittered(rng, COLOURS[colour], 18))
        marks.append(Mark(x, y, shape=shape, colour=colour))
    return Picture(with_noise(rng, image, rng.choice((0, 0, 3, 8))), tuple(marks), is_dark)


def _any_size(rng: random.Random) -> tuple[int, int]:
    width = rng.randint(84, 252)
    return width, rng.randint(84, min(252, MAX_AREA // width))


def _places(rng: random.Random, width: int, height: int, count: int) -> list[tuple[float, float, float]]:
    """(x, y, radius) of discs at least 3 pixels apart and inside the canvas."""
    places: list[tuple[float, float, float]] = []
    for _ in range(TRIES):
        if len(places) == count:
            break
        radius = rng.uniform(MIN_RADIUS, MAX_RADIUS)
        x, y = rng.uniform(radius + 1, width - radius - 1), rng.uniform(radius + 1, height - radius - 1)
        if all(math.hypot(x - a, y - b) > radius + other + 3 for a, b, other in places):
            places.append((x, y, radius))
    return places


def _draw(
    pen: ImageDraw.ImageDraw, rng: random.Random, shape: str, x: float, y: float, radius: float, colour: RGB
) -> None:
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        return
    turn = rng.uniform(-0.15, 0.15)
    corners, inner = {"square": (4, 1.0), "triangle": (3, 1.0), "star": (5, 0.42)}[shape]
    start = turn + (math.pi / 4 if shape == "square" else -math.pi / 2)
    points = []
    for step in range(2 * corners):
        if step % 2 and inner == 1.0:
            continue
        distance = radius * (inner if step % 2 else 1.0)
        angle = start + step * math.pi / corners
        points.append((x + distance * math.cos(angle), y + distance * math.sin(angle)))
    pen.polygon(points, fill=colour)
