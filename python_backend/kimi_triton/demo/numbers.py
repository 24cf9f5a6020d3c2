# SPDX-License-Identifier: Apache-2.0
"""Draw numbers from scans of handwritten digits.

With `freedom` 0 each digit fills one 28x28 cell of the canvas, from its top left corner on. With growing freedom the
digits change their size, spacing and place, lines slope, a second line appears and the canvas gets margins.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from kimi_triton.demo.pictures import CELL, MAX_AREA, MAX_SIDE, Mark, Picture, jittered, paper, with_noise
from kimi_triton.demo.scans import Part, Scan, pick_scans

MAX_DIGITS = 8
SCAN = 8  # pixels on a side of a scan
BORDER = 1  # empty pixels put around it, so that warping cuts nothing off


@dataclass(frozen=True, slots=True)
class Layout:
    """Digits of `size` pixels, `pitch` apart, in `lines` of the given lengths, `line_pitch` apart."""

    lines: tuple[int, ...]
    size: float
    pitch: float
    line_pitch: float

    @property
    def width(self) -> float:
        return self.pitch * max(self.lines)

    @property
    def height(self) -> float:
        return self.line_pitch * len(self.lines)


def draw_number(rng: random.Random, scans: Sequence[Scan], freedom: float, warp: float) -> Picture:
    """The digits of `scans` in reading order; `warp` (0..1) bends them as no scanner would, for training only."""
    layout = _layout(rng, len(scans), freedom)
    width, spare_width = _side(rng, layout.width, MAX_AREA / layout.height, freedom)
    height, spare_height = _side(rng, layout.height, MAX_AREA / width, freedom)
    left, top = rng.uniform(0, spare_width), rng.uniform(0, spare_height)
    slope = freedom * rng.uniform(-0.05, 0.05)
    ink = Image.new("L", (width, height))
    marks = []
    for place, (scan, (column, row)) in enumerate(zip(scans, _cells(layout.lines), strict=True)):
        indent = rng.uniform(0, 0.06) * freedom * layout.size
        x = left + (column + 0.5) * layout.pitch + indent
        y = top + (row + 0.5) * layout.line_pitch + slope * (x - width / 2)
        y += freedom * rng.uniform(-0.06, 0.06) * layout.size
        _stamp(ink, _glyph(rng, scan, layout.size * rng.uniform(1 - 0.1 * freedom, 1), warp), x, y)
        marks.append(Mark(x, y, digit=scan.digit, place=place))
    is_dark = rng.random() < 0.5
    return Picture(_coloured(rng, ink, is_dark, freedom), tuple(marks), is_dark)


def draw_page(rng: random.Random, part: Part, width: int, height: int, warp: float) -> Picture:
    """A canvas full of digits of one size, in no order: many examples of single digits for little work."""
    size = CELL * rng.uniform(0.85, 1.4)
    pitch = size * rng.uniform(0.9, 1.15)
    ink = Image.new("L", (width, height))
    marks = []
    left, top = rng.uniform(0.4, 1.0) * pitch, rng.uniform(0.45, 1.0) * pitch
    for row in range(int((height - top) / pitch + 0.6)):
        for column in range(int((width - left) / pitch + 0.6)):
            (scan,) = pick_scans(rng, part, str(rng.randrange(10)))
            x = left + (column + rng.uniform(-0.08, 0.08)) * pitch
            y = top + (row + rng.uniform(-0.08, 0.08)) * pitch
            _stamp(ink, _glyph(rng, scan, size * rng.uniform(0.9, 1), warp), x, y)
            marks.append(Mark(x, y, digit=scan.digit))
    is_dark = rng.random() < 0.5
    return Picture(_coloured(rng, ink, is_dark, freedom=1.0), tuple(marks), is_dark)


def _layout(rng: random.Random, count: int, freedom: float) -> Layout:
    lines: tuple[int, ...] = (count,)
    if count > 1 and rng.random() < 0.4 * freedom:
        first = rng.randint(1, count - 1)
        lines = (first, count - first)
    size = CELL * (1 + freedom * rng.uniform(-0.1, 0.4))
    pitch = size * (1 + freedom * rng.uniform(-0.1, 0.35))
    shrink = min(1.0, (MAX_SIDE - 4) / (pitch * max(lines)))
    size = max(size * shrink, 0.8 * CELL)
    return Layout(lines, size, pitch * shrink, size * (1 + freedom * rng.uniform(0, 0.4)))


def _side(rng: random.Random, needed: float, limit: float, freedom: float) -> tuple[int, float]:
    """Length of a side of the canvas, and how much of it the digits leave free."""
    room = max(0.0, min(MAX_SIDE, limit) - needed)
    side = math.ceil(needed + freedom * room * rng.random() ** 2.5)
    return side, max(0.0, side - needed) * min(1.0, 4 * freedom)


def _cells(lines: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(column, row) for row, length in enumerate(lines) for column in range(length)]


def _glyph(rng: random.Random, scan: Scan, size: float, warp: float) -> Image.Image:
    """An ink mask of the digit, turned, sheared, bent, and with a thinner or a thicker pen."""
    padded = Image.new("L", (SCAN + 2 * BORDER, SCAN + 2 * BORDER))
    padded.paste(Image.fromarray(scan.ink), (BORDER, BORDER))
    side = max(8, round(size * padded.width / SCAN))
    mask = padded.transform(
        (side, side), Image.Transform.MESH, _mesh(rng, side, padded.width, warp), Image.Resampling.BICUBIC
    )
    floor, gain = rng.uniform(40 - 20 * warp, 40 + 30 * warp), rng.uniform(1.6 - 0.4 * warp, 1.6 + 0.6 * warp)
    return mask.point([min(255, max(0, round((value - floor) * gain))) for value in range(256)])


def _mesh(rng: random.Random, side: int, source: int, warp: float) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Four quarters of the glyph, each taken from a crooked quarter of the scan; neighbours share their corners."""
    angle, shear = math.radians(rng.uniform(-4, 4) + warp * rng.uniform(-12, 12)), warp * rng.uniform(-0.2, 0.2)
    stretch_x, stretch_y = 1 + warp * rng.uniform(-0.15, 0.2), 1 + warp * rng.uniform(-0.1, 0.15)
    shift_x, shift_y = warp * rng.uniform(-0.5, 0.5), warp * rng.uniform(-0.5, 0.5)
    cos, sin, middle = math.cos(angle), math.sin(angle), source / 2

    def corner(column: int, row: int) -> tuple[float, float]:
        x, y = (column - 1) * middle * stretch_x, (row - 1) * middle * stretch_y
        x += shear * y
        bend = 0.25 * warp
        return (
            middle + cos * x - sin * y + shift_x + rng.gauss(0, bend),
            middle + sin * x + cos * y + shift_y + rng.gauss(0, bend),
        )

    points = {(column, row): corner(column, row) for row in range(3) for column in range(3)}
    half = side // 2
    edges = (0, half, side)
    return [
        (
            (edges[column], edges[row], edges[column + 1], edges[row + 1]),
            (
                *points[column, row],
                *points[column, row + 1],
                *points[column + 1, row + 1],
                *points[column + 1, row],
            ),
        )
        for row in range(2)
        for column in range(2)
    ]


def _stamp(ink: Image.Image, mask: Image.Image, x: float, y: float) -> None:
    ink.paste(255, (round(x - mask.width / 2), round(y - mask.height / 2)), mask)


def _coloured(rng: random.Random, ink: Image.Image, is_dark: bool, freedom: float) -> Image.Image:
    ground = paper(rng, is_dark)
    level = rng.randint(170, 250) if is_dark else rng.randint(5, 90)
    pen = jittered(rng, (level, level, level), round(40 * freedom))
    image = Image.composite(Image.new("RGB", ink.size, pen), Image.new("RGB", ink.size, ground), ink)
    return with_noise(rng, image, rng.choice((0, 0, 3, 8)) * freedom)
