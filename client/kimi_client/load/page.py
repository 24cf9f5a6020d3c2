# SPDX-License-Identifier: Apache-2.0
"""An HTML page in one file: its style sheet, tables, and how it is put together. No scripts, nothing loaded."""

from __future__ import annotations

import html
from collections.abc import Sequence

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #667085; --paper: #ffffff; --rule: #d5dae1; --bad: #b42318;
  --c0: #2f6fde; --c1: #e2761b; --c2: #2b9a66; --c3: #b5439c; --c4: #8a6d3b; --c5: #5b6770; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --dim: #98a2b3; --paper: #14181f; --rule: #344054; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p, dt { color: var(--dim); } dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dd { margin: 0; } .plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(480px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font-size: 11px; } text.title { font-size: 13px;
  font-weight: 600; } text.unit { fill: var(--dim); } .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none !important; stroke-width: 2; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .bad { color: var(--bad); font-weight: 600; }
code { font-size: 12px; overflow-wrap: anywhere; }
""" + "".join(f".c{n} {{ fill: var(--c{n}); stroke: var(--c{n}); }} rect.c{n} {{ stroke: none; }}\n" for n in range(6))


def page(title: str, *sections: str) -> str:
    """Return the whole document."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "".join([f"<h1>{html.escape(title)}</h1>", *sections])
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def section(title: str, *parts: str) -> str:
    """Return a heading and what is below it."""
    return f"<h2>{html.escape(title)}</h2>{''.join(parts)}"


def plots(*drawings: str) -> str:
    """Return drawings side by side, as far as they fit."""
    return f'<div class="plots">{"".join(drawings)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], bad_rows: Sequence[int] = ()) -> str:
    """Return a table of plain text; the rows with the numbers in `bad_rows` stand out."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = []
    for number, row in enumerate(rows):
        mark = ' class="bad"' if number in bad_rows else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return names with their values below each other."""
    return "<dl>" + "".join(f"<dt>{html.escape(n)}</dt><dd>{html.escape(v)}</dd>" for n, v in pairs) + "</dl>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


def code(text: str) -> str:
    """Return a line that can be copied into a terminal."""
    return f"<p><code>{html.escape(text)}</code></p>"
