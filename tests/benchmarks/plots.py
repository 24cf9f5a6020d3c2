# SPDX-License-Identifier: Apache-2.0
"""Small plots as SVG text, so that a report is one file that opens anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 460, 220, 60, 30
STYLE = "body{font:15px sans-serif;margin:2em}figure{display:inline-block;margin:1em}pre{overflow:auto}"
BLUE, RED = "#4a7ab5", "#c0392b"


def bars(title: str, values: Mapping[str, float], wanted: Mapping[str, float]) -> str:
    """One bar for each value; a line across it where a bar was asked for."""
    top = max([*values.values(), *wanted.values()]) * 1.15
    step = (WIDTH - LEFT) / len(values)
    parts = []
    for place, (name, value) in enumerate(values.items()):
        x, y, wide = LEFT + (place + 0.2) * step, _y(value, top), step * 0.6
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{HEIGHT - y:.0f}" fill="{BLUE}"/>')
        parts.append(_text(x + wide / 2, y - 5, f"{value:g}"))
        parts.append(_text(x + wide / 2, HEIGHT + 16, name))
        if name in wanted:
            y = _y(wanted[name], top)
            parts.append(f'<path d="M{x - 8:.0f} {y:.0f}h{wide + 16:.0f}" stroke="{RED}" stroke-width="2"/>')
    return _figure(title, parts)


def lines(title: str, points: Mapping[float, float]) -> str:
    """One line through the points, both axes from 0."""
    right, top = max(points) * 1.05, max(points.values()) * 1.15 or 1.0
    placed = [(LEFT + x / right * (WIDTH - LEFT), _y(y, top)) for x, y in points.items()]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
    parts = [f'<path d="M{path}" fill="none" stroke="{BLUE}" stroke-width="2"/>']
    for (x, y), (count, value) in zip(placed, points.items(), strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{BLUE}"/>')
        parts.append(_text(x, y - 8, f"{value:g}"))
        parts.append(_text(x, HEIGHT + 16, f"{count:g}"))
    return _figure(title, parts)


def page(title: str, plots: Sequence[str], singles: Mapping[str, float], raw: Any) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td><b>{value:g}</b></td></tr>" for name, value in singles.items())
    figures = "".join(plots)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1><table>{rows}</table>{figures}<pre>{escape(json.dumps(raw, indent=1))}</pre></html>"
    )


def _y(value: float, top: float) -> float:
    return HEIGHT - value / top * (HEIGHT - TOP)


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="12" text-anchor="middle">{escape(words)}</text>'


def _figure(title: str, parts: Sequence[str]) -> str:
    axes = f'<path d="M{LEFT} {TOP}V{HEIGHT}H{WIDTH}" fill="none" stroke="#333"/>'
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg width="{WIDTH + 20}" height="{HEIGHT + 30}">'
        f"{axes}{''.join(parts)}</svg></figure>"
    )
