# SPDX-License-Identifier: Apache-2.0
"""Two load tests side by side, and what got worse from the first to the second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kimi_client.load.figures import Percentiles, RunResult
from kimi_client.load.page import page, paragraph, plots, section, table
from kimi_client.load.report import name
from kimi_client.load.results import LoadTest
from kimi_client.load.svg import bar_plot


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that two runs are compared by."""

    label: str
    unit: str
    more_is_better: bool
    value: Callable[[RunResult], float | None]


def _part(percentiles: Percentiles | None, name: str) -> float | None:
    return None if percentiles is None else getattr(percentiles, name)


MEASURES = (
    Measure("requests answered", "requests/s", True, lambda run: run.requests_per_s or None),
    Measure("tokens written", "tokens/s", True, lambda run: run.tokens_per_s or None),
    Measure("end to end p50", "ms", False, lambda run: _part(run.total_ms, "p50")),
    Measure("end to end p99", "ms", False, lambda run: _part(run.total_ms, "p99")),
    Measure("first token p50", "ms", False, lambda run: _part(run.ttft_ms, "p50")),
    Measure("between tokens p50", "ms", False, lambda run: _part(run.token_gap_ms, "p50")),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one run, before and after. `factor` is after / before."""

    run: str
    measure: Measure
    before: float
    after: float

    @property
    def factor(self) -> float:
        return self.after / self.before

    def is_worse(self, tolerance: float) -> bool:
        """Whether it got worse by more than `tolerance`, a share of the value before."""
        return self.factor < 1 - tolerance if self.measure.more_is_better else self.factor > 1 + tolerance

    def __str__(self) -> str:
        unit = self.measure.unit
        return f"{self.run}: {self.measure.label} {self.before:.4g} -> {self.after:.4g} {unit} (x{self.factor:.2f})"


def changes(before: LoadTest, after: LoadTest) -> Iterator[Change]:
    """Yield every figure of every run that both tests have, by protocol and load."""
    earlier = {run.key: run for run in before.runs}
    for run in after.runs:
        if run.key in earlier:
            for measure in MEASURES:
                old, new = measure.value(earlier[run.key]), measure.value(run)
                if old and new is not None:
                    yield Change(name(run), measure, old, new)


def new_failures(before: LoadTest, after: LoadTest) -> list[str]:
    """Return a line for every run that has more failed requests than before."""
    earlier = {run.key: run.failed for run in before.runs}
    return [
        f"{name(run)}: {run.failed} failed requests, {earlier[run.key]} before"
        for run in after.runs
        if run.failed > earlier.get(run.key, run.failed)
    ]


def comparison(before: LoadTest, after: LoadTest, tolerance: float) -> str:
    """Return the page that shows both."""
    found = list(changes(before, after))
    worse = [number for number, change in enumerate(found) if change.is_worse(tolerance)]
    words = [*new_failures(before, after), *(str(found[number]) for number in worse)]
    rows = [
        [c.run, c.measure.label, f"{c.before:.4g}", f"{c.after:.4g}", c.measure.unit, f"x{c.factor:.2f}"] for c in found
    ]
    drawings = []
    for measure in MEASURES:
        chosen = [change for change in found if change.measure is measure]
        if chosen:
            groups = [change.run.replace(" ", "\n", 1) for change in chosen]
            values = {"before": [c.before for c in chosen], "after": [c.after for c in chosen]}
            drawings.append(bar_plot(measure.label, measure.unit, groups, values))
    return page(
        f"{after.title} against {before.title}",
        paragraph(f"before: {before.made_at} · after: {after.made_at} · worse: by more than {tolerance:.0%}"),
        section("What got worse", *map(paragraph, words or ["nothing"])),
        section("Side by side", plots(*drawings)),
        section("All figures", table(("run", "figure", "before", "after", "unit", "change"), rows, worse)),
    )
