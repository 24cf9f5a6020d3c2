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
MAX_SHAPES = 6  # in a scene that is asked about
MIN_RADIUS, MAX_RADIUS = 11, 24
GAP = 3  # pixels between two shapes, at least
TRIES = 200
Place = tuple[float, float, float]  # x, y and radius of a disc around a shape


def draw_scene(rng: random.Random, count: int, size: tuple[int, int] | None = None) -> Picture:
    """Up to `count` shapes on a canvas of `size`, or of any size and aspect ratio: half of the time in one or two
    rows, which gives them an order, else anywhere (fewer when they do not fit). On a given size always anywhere."""
    is_ordered = size is None and rng.random() < 0.5
    if is_ordered:
        (width, height), places = _rows(rng, count)
    else:
        width, height = size or _any_size(rng)
        places = _anywhere(rng, width, height, count)
    is_dark = rng.random() < 0.5
    image = Image.new("RGB", (width, height), paper(rng, is_dark))
    pen = ImageDraw.Draw(image)
    colours = [colour for colour in COLOURS if colour != ("black" if is_dark else "white")]
    marks: list[Mark] = []
    for place, (x, y, radius) in enumerate(places):
        shape, colour = rng.choice(SHAPES), rng.choice(colours)
        _draw(pen, rng, shape, x, y, radius, jittered(rng, COLOURS[colour], 18))
        marks.append(Mark(x, y, place=place if is_ordered else None, shape=shape, colour=colour))
    return Picture(with_noise(rng, image, rng.choice((0, 0, 3, 8))), tuple(marks), is_dark)


def _any_size(rng: random.Random) -> tuple[int, int]:
    width = rng.randint(84, 252)
    return width, rng.randint(84, min(252, MAX_AREA // width))


def _anywhere(rng: random.Random, width: int, height: int, count: int) -> list[Place]:
    """Discs apart from each other and inside the canvas."""
    places: list[Place] = []
    for _ in range(TRIES):
        if len(places) == count:
            break
        radius = rng.uniform(MIN_RADIUS, MAX_RADIUS)
        x, y = rng.uniform(radius + 1, width - radius - 1), rng.uniform(radius + 1, height - radius - 1)
        if all(math.hypot(x - a, y - b) > radius + other + GAP for a, b, other in places):
            places.append((x, y, radius))
    return places


def _rows(rng: random.Random, count: int) -> tuple[tuple[int, int], list[Place]]:
    """The size of a canvas, and discs on it in reading order, each somewhere in a field of its own."""
    first = rng.randint((count + 1) // 2, count - 1) if count > 2 and rng.random() < 0.5 else count
    lengths = [first, count - first] if first < count else [count]
    pitch_x = rng.uniform(2 * MIN_RADIUS + GAP + 3, min(62.0, 248 / first))
    pitch_y = rng.uniform(2 * MIN_RADIUS + GAP + 3, min(62.0, MAX_AREA / (first * pitch_x * len(lengths))))
    needed_x, needed_y = first * pitch_x, len(lengths) * pitch_y
    width = int(needed_x + rng.random() ** 2 * max(0.0, min(252.0, MAX_AREA / needed_y) - needed_x)) + 1
    height = int(needed_y + rng.random() ** 2 * max(0.0, min(252.0, MAX_AREA / width) - needed_y)) + 1
    left, top = rng.uniform(0, width - needed_x), rng.uniform(0, height - needed_y)
    places = []
    for row, length in enumerate(lengths):
        for column in range(length):
            radius = rng.uniform(MIN_RADIUS, min(MAX_RADIUS, (min(pitch_x, pitch_y) - GAP) / 2))
            x = left + (column + 0.5) * pitch_x + rng.uniform(-1, 1) * ((pitch_x - GAP) / 2 - radius)
            y = top + (row + 0.5) * pitch_y + rng.uniform(-1, 1) * ((pitch_y - GAP) / 2 - radius)
            places.append((x, y, radius))
    return (width, height), places


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
