# SPDX-License-Identifier: Apache-2.0
"""From the records of one run to the figures people compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_client.load.export_file import RequestRecord
from kimi_client.load.server_figures import StepTime

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in milliseconds."""

    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Nearest-rank percentiles: each is a value that was measured. None where nothing was."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(*(ordered[-(-percent * len(ordered) // 100) - 1] for percent in PERCENTILES))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run: what was asked for, what came back, and what the server says about it.

    `server_tokens` is None where the server publishes no count of tokens. `ttft_ms` and `token_gap_ms`, the mean time
    from token to token within a request, are None for answers that are not streamed. `error` is perf_analyzer's last
    word where it gave up.
    """

    protocol: str  # grpc-stream, grpc or http
    mode: str  # concurrency or rate
    level: float  # requests in flight, or requests per second
    requests: int
    failed: int
    tokens: int
    prompt_tokens: int
    cached_images: int
    server_requests: int
    server_failed: int
    server_tokens: int | None
    seconds: float  # from the first request sent to the last response
    requests_per_s: float
    tokens_per_s: float
    total_ms: Percentiles | None
    ttft_ms: Percentiles | None
    token_gap_ms: Percentiles | None
    steps: dict[str, StepTime]
    latencies_ms: tuple[float, ...]  # end to end, of every request in the order sent
    ttfts_ms: tuple[float, ...]  # likewise to the first token, of streamed answers
    command: str
    error: str = ""

    @property
    def agrees_with_server(self) -> bool:
        """Whether client and server counted the same requests and tokens."""
        same_tokens = self.server_tokens is None or self.server_tokens == self.tokens
        return self.requests == self.server_requests and self.failed == self.server_failed and same_tokens

    @property
    def key(self) -> tuple[str, str, float]:
        """What makes two runs comparable."""
        return self.protocol, self.mode, self.level


def duration_s(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first request sent to the last response."""
    if not records:
        return 0.0
    first = min(record.sent_ns for record in records)
    return (max(record.responses[-1].time_ns for record in records) - first) / 1e9
