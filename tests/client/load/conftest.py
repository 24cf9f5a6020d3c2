# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kimi_client.load.figures import Percentiles, RunResult
from kimi_client.load.results import LoadTest
from kimi_client.load.server_figures import StepTime


def make_run(level: float = 1, protocol: str = "grpc-stream", mode: str = "concurrency", **changed: Any) -> RunResult:
    """A plausible run; `changed` replaces fields."""
    is_streamed = protocol == "grpc-stream"
    fields: dict[str, Any] = {
        "protocol": protocol,
        "mode": mode,
        "level": level,
        "requests": 20,
        "failed": 0,
        "tokens": 160,
        "prompt_tokens": 400,
        "cached_images": 3,
        "server_requests": 20,
        "server_failed": 0,
        "server_tokens": 160,
        "seconds": 4.0,
        "requests_per_s": 5.0 * level**0.5,
        "tokens_per_s": 40.0 * level**0.5,
        "total_ms": Percentiles(100 * level, 150 * level, 160 * level, 200 * level),
        "ttft_ms": Percentiles(30, 40, 45, 60) if is_streamed else None,
        "token_gap_ms": Percentiles(4, 5, 6, 9) if is_streamed else None,
        "steps": {"preprocess": StepTime(1, 5), "moonvit": StepTime(2, 40), "llm": StepTime(0.5, 60)},
        "latencies_ms": (100.0, 120.0, 200.0),
        "ttfts_ms": (30.0, 31.0, 60.0) if is_streamed else (),
        "command": "perf_analyzer -m kimi_vl",
    }
    return RunResult(**{**fields, **changed})


def make_test(runs: list[RunResult], title: str = "Load test") -> LoadTest:
    mix = {"image sizes": "640x480", "seed": 0}
    return LoadTest(title=title, made_at="2026-11-30T18:00:00+00:00", server={"version": "2.51.0"}, mix=mix, runs=runs)


@pytest.fixture
def run() -> Callable[..., RunResult]:
    return make_run


@pytest.fixture
def load_test() -> Callable[..., LoadTest]:
    return make_test
