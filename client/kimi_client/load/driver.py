# SPDX-License-Identifier: Apache-2.0
"""Runs perf_analyzer once for each protocol and load, and reads what the server counted before and after.

The number of requests is fixed for each run, so that every request that was sent is in the export and the server's
count must be the same. To fill a number of seconds, a short run measures the rate first.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kimi_client.load.export_file import RequestRecord, read_export
from kimi_client.load.figures import Percentiles, RunResult, duration_s
from kimi_client.load.input_file import write_input_file
from kimi_client.load.mix import DrawnRequest, Mix, draw_requests
from kimi_client.load.perf_analyzer import PerfAnalyzer
from kimi_client.load.server_figures import COMPLETION_TOKENS, Reading, settled_figures
from kimi_client.request import CHAT_MODEL, UNARY_CHAT_MODEL

CALIBRATION_ROUNDS = 3  # answers per request in flight, to find out how many fit into the seconds wanted
LEAST_REQUESTS = 10
GIVE_UP_AFTER = 5.0  # times the expected duration
GIVE_UP_AT_LEAST_S = 180.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server's endpoints are, each as host:port."""

    grpc_url: str
    http_url: str
    metrics_url: str


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a load test: closed loop (concurrency in flight) or open loop (Poisson arrivals per second)."""

    protocol: Literal["grpc-stream", "grpc", "http"]
    mode: Literal["concurrency", "rate"]
    level: float

    @property
    def model(self) -> str:
        return CHAT_MODEL if self.protocol == "grpc-stream" else UNARY_CHAT_MODEL


class Driver:
    """Sends a mix to a server, at most `distinct` different requests per run; `folder` is for its files."""

    def __init__(self, server: Server, analyzer: PerfAnalyzer, mix: Mix, folder: Path, distinct: int) -> None:
        self._server = server
        self._analyzer = analyzer
        self._mix = mix
        self._folder = folder
        self._distinct = distinct
        self._drawn = 0

    def run_all(
        self, loads: Sequence[Load], seconds: float, count: int | None, tell: Callable[[str], None]
    ) -> Iterator[RunResult]:
        """Run every load for about `seconds`, or with exactly `count` requests."""
        for load in loads:
            number = count or self._requests_for(load, seconds)
            tell(f"{load.protocol}, {load.mode} {load.level:g}: {number} requests")
            yield self.run(load, number, seconds)

    def run(self, load: Load, count: int, seconds: float) -> RunResult:
        """Send exactly `count` requests and compare notes with the server."""
        requests = self._draw(count)
        before = settled_figures(self._server.http_url, self._server.metrics_url)
        records, command, error = self._analyze(load, count, requests, seconds)
        after = settled_figures(self._server.http_url, self._server.metrics_url)
        return _result(load, records, after.since(before), command, error)

    def _requests_for(self, load: Load, seconds: float) -> int:
        if load.mode == "rate":
            return max(LEAST_REQUESTS, round(load.level * seconds))
        count = max(LEAST_REQUESTS, CALIBRATION_ROUNDS * int(load.level))
        records, _, error = self._analyze(load, count, self._draw(count), seconds)
        if error:
            return count  # the run itself will fail likewise and be reported
        return max(LEAST_REQUESTS, round(len(records) / duration_s(records) * seconds))

    def _draw(self, count: int) -> list[DrawnRequest]:
        # Another seed each time, else a run would find the pictures of the one before in the server's cache.
        mix = replace(self._mix, seed=self._mix.seed + self._drawn)
        self._drawn += 1
        return draw_requests(mix, min(count, self._distinct))

    def _analyze(
        self, load: Load, count: int, requests: Sequence[DrawnRequest], seconds: float
    ) -> tuple[list[RequestRecord], str, str]:
        inputs, export = self._folder / "inputs.json", self._folder / "export.json"
        write_input_file(inputs, requests, stream=load.protocol == "grpc-stream", max_tokens=self._mix.max_tokens)
        export.unlink(missing_ok=True)
        command = [str(self._analyzer.path), *arguments(load, self._server, count, inputs, export)]
        error = self._execute(command, max(GIVE_UP_AT_LEAST_S, GIVE_UP_AFTER * seconds))
        records = [] if error else read_export(export)
        export.unlink(missing_ok=True)  # it repeats the pictures of every request
        return records, shlex.join(["perf_analyzer", *command[1:]]), error

    def _execute(self, command: Sequence[str], timeout_s: float) -> str:
        try:
            done = subprocess.run(
                command,
                env=self._analyzer.environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return f"perf_analyzer did not end within {timeout_s:g} s"
        return "" if done.returncode == 0 else _last_words(done.stdout + done.stderr)


def arguments(load: Load, server: Server, count: int, inputs: Path, export: Path) -> list[str]:
    """Return perf_analyzer's arguments for one run."""
    is_http = load.protocol == "http"
    chosen = [
        "-m",
        load.model,
        "-i",
        "http" if is_http else "grpc",
        "-u",
        server.http_url if is_http else server.grpc_url,
    ]
    if load.protocol == "grpc-stream":
        chosen.append("--streaming")
    if load.mode == "concurrency":
        chosen += ["--concurrency-range", f"{load.level:g}"]
    else:
        chosen += ["--request-rate-range", f"{load.level:g}", "--request-distribution", "poisson"]
    chosen += ["--async", "--request-count", str(count), "--input-data", str(inputs)]
    return [*chosen, "--profile-export-file", str(export)]


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
    return (telling or lines or ["perf_analyzer failed without a word"])[-1]


def _result(load: Load, records: Sequence[RequestRecord], server: Reading, command: str, error: str) -> RunResult:
    records = sorted(records, key=lambda record: record.sent_ns)
    seconds = duration_s(records)
    tokens = sum(record.completion_tokens for record in records)
    is_streamed = load.protocol == "grpc-stream"
    ttfts = [record.first_ms for record in records] if is_streamed else []
    server_tokens = server.metrics.get(COMPLETION_TOKENS)
    return RunResult(
        protocol=load.protocol,
        mode=load.mode,
        level=load.level,
        requests=len(records),
        failed=max(1, server.count(load.model, "fail")) if error else 0,
        tokens=tokens,
        prompt_tokens=sum(record.prompt_tokens for record in records),
        cached_images=sum(record.cached_images for record in records),
        server_requests=server.count(load.model, "success"),
        server_failed=server.count(load.model, "fail"),
        server_tokens=None if server_tokens is None else round(server_tokens),
        seconds=seconds,
        requests_per_s=len(records) / seconds if seconds else 0.0,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        total_ms=Percentiles.of([record.total_ms for record in records]),
        ttft_ms=Percentiles.of(ttfts),
        token_gap_ms=Percentiles.of([gap for record in records if (gap := record.token_gap_ms) is not None]),
        steps=server.step_times(CHAT_MODEL),
        latencies_ms=tuple(round(record.total_ms, 3) for record in records),
        ttfts_ms=tuple(round(value, 3) for value in ttfts),
        command=command,
        error=error,
    )
