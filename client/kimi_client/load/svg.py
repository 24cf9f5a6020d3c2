# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG text: lines, bars in groups, and stacked bars. Colours come from the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 64
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
NUM_COLOURS = 6
TICKS = 5
BAR_SHARE = 0.8  # of the room of a group that its bars fill


@dataclass(frozen=True, slots=True)
class Axes:
    """A plot's words and the value at the upper end of its vertical axis."""

    title: str
    x_label: str
    y_label: str
    top: float

    def y(self, value: float) -> float:
        return TOP + INNER_HEIGHT * (1 - value / self.top)


def line_plot(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw one line per series of (x, y) points; the x values are spread evenly, as concurrencies double."""
    axes = Axes(title, x_label, y_label, _top(y for points in series.values() for _, y in points))
    xs = sorted({x for points in series.values() for x, _ in points})
    place = {x: LEFT + INNER_WIDTH * (index + 0.5) / len(xs) for index, x in enumerate(xs)}
    parts = [_text(place[x], TOP + INNER_HEIGHT + 16, f"{x:g}", "middle") for x in xs]
    for number, (name, points) in enumerate(series.items()):
        spots = [(place[x], axes.y(y), y) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)
        parts.append(f'<polyline class="line c{number % NUM_COLOURS}" points="{path}"/>')
        parts += [
            f'<circle class="dot c{number % NUM_COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3">{_hint(name, value)}</circle>'
            for x, y, value in spots
        ]
    return _plot(axes, parts, list(series))


def bar_plot(title: str, y_label: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """Draw, for each group, one bar per series beside the others."""
    axes = Axes(title, "", y_label, _top(value for values in series.values() for value in values))
    room = INNER_WIDTH / max(1, len(groups))
    width = room * BAR_SHARE / max(1, len(series))
    parts = _group_names(groups)
    for number, (name, values) in enumerate(series.items()):
        for index, value in enumerate(values):
            x = LEFT + room * (index + (1 - BAR_SHARE) / 2) + width * number
            parts.append(_bar(x, width, axes.y(value), axes.y(0), number, name, value))
    return _plot(axes, parts, list(series))


def stacked_plot(title: str, y_label: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """Draw one bar per group, made of the series on top of each other."""
    sums = [sum(values) for values in zip(*series.values(), strict=True)]
    axes = Axes(title, "", y_label, _top(sums))
    room = INNER_WIDTH / max(1, len(groups))
    parts = _group_names(groups)
    base = [0.0] * len(groups)
    for number, (name, values) in enumerate(series.items()):
        for index, value in enumerate(values):
            x = LEFT + room * (index + (1 - BAR_SHARE) / 2)
            upper, lower = axes.y(base[index] + value), axes.y(base[index])
            parts.append(_bar(x, room * BAR_SHARE, upper, lower, number, name, value))
            base[index] += value
    return _plot(axes, parts, list(series))


def _plot(axes: Axes, parts: Sequence[str], names: Sequence[str]) -> str:
    grid = []
    for tick in range(TICKS + 1):
        value = axes.top * tick / TICKS
        y = axes.y(value)
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(_text(LEFT - 6, y + 4, f"{value:.4g}", "end"))
    words = [
        _text(LEFT, 18, axes.title, "start", "title"),
        _text(LEFT, TOP - 8, axes.y_label, "start", "unit"),
        _text(LEFT + INNER_WIDTH / 2, HEIGHT - 30, axes.x_label, "middle"),
    ]
    body = "".join([*grid, *parts, *words, *_legend(names)])
    label = html.escape(axes.title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{body}</svg>'


def _legend(names: Sequence[str]) -> list[str]:
    room = INNER_WIDTH / max(1, len(names))
    parts = []
    for number, name in enumerate(names):
        x = LEFT + room * number
        parts.append(f'<rect class="c{number % NUM_COLOURS}" x="{x:.1f}" y="{HEIGHT - 18}" width="10" height="10"/>')
        parts.append(_text(x + 14, HEIGHT - 9, name, "start"))
    return parts


def _group_names(groups: Sequence[str]) -> list[str]:
    room = INNER_WIDTH / max(1, len(groups))
    parts = []
    for index, name in enumerate(groups):
        for line, words in enumerate(name.split("\n")):
            parts.append(_text(LEFT + room * (index + 0.5), TOP + INNER_HEIGHT + 14 + 11 * line, words, "middle"))
    return parts


def _bar(x: float, width: float, upper: float, lower: float, number: int, name: str, value: float) -> str:
    return (
        f'<rect class="bar c{number % NUM_COLOURS}" x="{x:.1f}" y="{upper:.1f}" width="{width:.1f}"'
        f' height="{max(0.0, lower - upper):.1f}">{_hint(name, value)}</rect>'
    )


def _hint(name: str, value: float) -> str:
    return f"<title>{html.escape(name)}: {value:.4g}</title>"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _top(values: object) -> float:
    """Return the upper end of an axis: the largest value, rounded up to a number that divides well into ticks."""
    largest = max(values, default=0.0)  # type: ignore[call-overload]
    if not largest > 0:
        return 1.0
    unit: float = 10.0 ** math.floor(math.log10(largest))
    return next(step * unit for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * unit >= largest * 0.999)
