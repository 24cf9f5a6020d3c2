# SPDX-License-Identifier: Apache-2.0
"""A load test as one HTML page: plots, a table of every figure, and how to run each part again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kimi_client.load.figures import Percentiles, RunResult
from kimi_client.load.page import code, facts, page, paragraph, plots, section, table
from kimi_client.load.results import LoadTest
from kimi_client.load.server_figures import STEPS
from kimi_client.load.svg import line_plot, stacked_plot

X_LABELS = {"concurrency": "requests in flight", "rate": "requests per second sent"}
HEADER = (
    "run", "requests", "failed", "req/s", "tok/s", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "TTFT p50", "TTFT p99",
    "gap p50", "gap p99", "tokens", "cached images", "server requests", "server tokens",
)  # fmt: skip


def report(test: LoadTest) -> str:
    """Return the page for a load test."""
    notes = [f"{name(run)}: {problem}" for run in test.runs if (problem := _problem(run))]
    return page(
        test.title,
        paragraph(f"{test.made_at} · {test.server.get('version', '')} · {test.server.get('grpc_url', '')}"),
        facts([(key, _plain(value)) for key, value in test.mix.items()]),
        section("What went wrong", *map(paragraph, notes)) if notes else "",
        *(_plots(test.runs, mode) for mode in X_LABELS if any(run.mode == mode for run in test.runs)),
        section("Where the time goes", _step_plot(test.runs), paragraph(STEP_NOTE)),
        section("All figures", table(HEADER, [_row(run) for run in test.runs], _bad_rows(test.runs))),
        section("The same again", *(code(run.command) for run in test.runs)),
    )


STEP_NOTE = (
    "Means per request, by the server's statistics. What a request took beyond preprocess, moonvit and the queue before"
    " llm counts as llm."
)


def name(run: RunResult) -> str:
    """Return what tells a run from the others, in a few words."""
    unit = "in flight" if run.mode == "concurrency" else "req/s"
    return f"{run.protocol} {run.level:g} {unit}"


def _plots(runs: Sequence[RunResult], mode: str) -> str:
    chosen = [run for run in runs if run.mode == mode and run.total_ms]
    x_label = X_LABELS[mode]
    protocols = list(dict.fromkeys(run.protocol for run in chosen))

    def by_protocol(value: Any) -> dict[str, list[tuple[float, float]]]:
        lines = {
            p: [(r.level, value(r)) for r in chosen if r.protocol == p and value(r) is not None] for p in protocols
        }
        return {protocol: points for protocol, points in lines.items() if points}

    drawings = [
        line_plot("Requests answered", x_label, "requests/s", by_protocol(lambda run: run.requests_per_s)),
        line_plot("Tokens written", x_label, "tokens/s", by_protocol(lambda run: run.tokens_per_s)),
    ]
    for protocol in protocols:
        lines = percentile_lines([run for run in chosen if run.protocol == protocol], "total_ms")
        drawings.append(line_plot(f"End to end, {protocol}", x_label, "ms", lines))
    for field, title in (("ttft_ms", "Time to first token"), ("token_gap_ms", "Time between tokens")):
        lines = percentile_lines(chosen, field)
        if lines:
            drawings.append(line_plot(title, x_label, "ms", lines))
    return section("Closed loop" if mode == "concurrency" else "Open loop, Poisson arrivals", plots(*drawings))


def percentile_lines(runs: Sequence[RunResult], field: str) -> dict[str, list[tuple[float, float]]]:
    """Return a line for each percentile over the levels of the runs that have the field."""
    measured = [(run.level, getattr(run, field)) for run in runs if getattr(run, field)]
    names = Percentiles.__slots__ if measured else ()
    return {percentile: [(level, getattr(value, percentile)) for level, value in measured] for percentile in names}


def _step_plot(runs: Sequence[RunResult]) -> str:
    answered = [run for run in runs if run.total_ms]
    series: dict[str, list[float]] = {}
    for step in STEPS:
        series[f"{step} queue"] = [run.steps[step].queue_ms for run in answered]
        series[step] = [run.steps[step].compute_ms for run in answered]
    groups = [f"{run.protocol}\n{run.level:g}{'' if run.mode == 'concurrency' else '/s'}" for run in answered]
    return plots(stacked_plot("Mean time per request", "ms", groups, series))


def _row(run: RunResult) -> list[str]:
    def take(value: Percentiles | None, names: Iterable[str]) -> list[str]:
        return [f"{getattr(value, n):.1f}" if value else "–" for n in names]

    return [
        name(run),
        f"{run.requests}",
        f"{run.failed}",
        f"{run.requests_per_s:.2f}",
        f"{run.tokens_per_s:.1f}",
        *take(run.total_ms, ("p50", "p90", "p95", "p99")),
        *take(run.ttft_ms, ("p50", "p99")),
        *take(run.token_gap_ms, ("p50", "p99")),
        f"{run.tokens}",
        f"{run.cached_images}",
        f"{run.server_requests}",
        "–" if run.server_tokens is None else f"{run.server_tokens}",
    ]


def _bad_rows(runs: Sequence[RunResult]) -> list[int]:
    return [number for number, run in enumerate(runs) if _problem(run)]


def _problem(run: RunResult) -> str:
    if run.error:
        return run.error
    if not run.agrees_with_server:
        counted = f"{run.requests} requests and {run.tokens} tokens"
        return f"counted {counted}, the server {run.server_requests} and {run.server_tokens}"
    return ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
