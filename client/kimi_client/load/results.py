# SPDX-License-Identifier: Apache-2.0
"""The outcome of a load test on disk: JSON with everything, CSV with a row per run."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_client.errors import InvalidRequest
from kimi_client.load.figures import Percentiles, RunResult
from kimi_client.load.server_figures import StepTime

PERCENTILE_FIELDS = ("total_ms", "ttft_ms", "token_gap_ms")
CSV_PLAIN = (
    "protocol mode level requests failed tokens server_requests server_failed server_tokens cached_images seconds"
    " requests_per_s tokens_per_s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """A whole load test: its runs, and under which circumstances they were made."""

    title: str
    made_at: str  # ISO 8601, local time with its offset
    server: Mapping[str, Any]
    mix: Mapping[str, Any]
    runs: Sequence[RunResult]

    def summary(self) -> dict[str, Any]:
        """Return the totals over all runs in one small object; percentiles are those of all requests together."""
        total = Percentiles.of([value for run in self.runs for value in run.latencies_ms])
        first = Percentiles.of([value for run in self.runs for value in run.ttfts_ms])
        seconds = sum(run.seconds for run in self.runs)
        server_tokens = [run.server_tokens for run in self.runs]
        return {
            "failed": sum(run.failed for run in self.runs),
            "requests": sum(run.requests for run in self.runs),
            "server_requests": sum(run.server_requests for run in self.runs),
            "tokens": sum(run.tokens for run in self.runs),
            "server_tokens": None if None in server_tokens else sum(filter(None, server_tokens)),
            "p50_ms": total and total.p50,
            "p99_ms": total and total.p99,
            "ttft_p50_ms": first and first.p50,
            "tokens_per_s": sum(run.tokens for run in self.runs) / seconds if seconds else 0.0,
        }


def write_json(path: Path, test: LoadTest) -> None:
    """Write everything that `read_json` needs to make the same test again."""
    path.write_text(json.dumps(asdict(test)))


def read_json(path: Path) -> LoadTest:
    """Read what `write_json` wrote; raises InvalidRequest for any other file."""
    try:
        data = json.loads(path.read_text())
        return LoadTest(**{**data, "runs": [_run(run) for run in data["runs"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{path} is no result of kimi-client load: {error!r}") from error


def write_csv(path: Path, test: LoadTest) -> None:
    """Write one row per run: counts, rates, percentiles in ms, and mean ms per step."""
    rows = [_row(run) for run in test.runs]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def _row(run: RunResult) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in CSV_PLAIN.split()}
    for field in PERCENTILE_FIELDS:
        percentiles = getattr(run, field)
        row |= {f"{field}_{name}": value for name, value in (asdict(percentiles) if percentiles else {}).items()}
    for step, time in run.steps.items():
        row |= {f"{step}_queue_ms": time.queue_ms, f"{step}_compute_ms": time.compute_ms}
    return row | {"error": run.error}


def _run(data: dict[str, Any]) -> RunResult:
    percentiles = {name: data[name] and Percentiles(**data[name]) for name in PERCENTILE_FIELDS}
    steps = {step: StepTime(**time) for step, time in data["steps"].items()}
    return RunResult(
        **{
            **data,
            **percentiles,
            "steps": steps,
            "latencies_ms": tuple(data["latencies_ms"]),
            "ttfts_ms": tuple(data["ttfts_ms"]),
        }
    )
