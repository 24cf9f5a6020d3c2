# SPDX-License-Identifier: Apache-2.0
"""perf_analyzer itself against a real server: what it counted is what the server counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kimi_client.__main__ as command
from kimi_client.load import perf_analyzer
from kimi_client.load.results import read_json

pytestmark = pytest.mark.server


@pytest.fixture(scope="module", autouse=True)
def _analyzer() -> None:
    assert perf_analyzer.main() == 0  # what `make perf-analyzer` runs


def arguments(live_server: Any, *more: str) -> list[str]:
    urls = ["--grpc", live_server.grpc_url, "--http", live_server.http_url, "--metrics", live_server.metrics_url]
    small = ["--image-sizes", "56x56:2,84x28", "--images-per-request", "0:1,1:2,2:1", "--max-tokens", "8"]
    return ["load", *urls, *small, *more]


def test_i2_requests_and_tokens_agree_with_the_server_on_every_protocol(
    live_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    protocols = ["--protocol", "grpc-stream", "--protocol", "grpc", "--protocol", "http"]
    loads = ["--concurrency", "1,3", "--rate", "10", "--requests", "10", "--repeat-rate", "0.5", "--out", str(tmp_path)]
    assert command.main(arguments(live_server, *protocols, *loads)) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["failed"], summary["requests"], summary["server_requests"]) == (0, 90, 90)
    assert summary["tokens"] == summary["server_tokens"]
    assert 90 <= summary["tokens"] <= 90 * 8
    assert summary["ttft_p50_ms"] > 0
    assert 0 < summary["p50_ms"] <= summary["p99_ms"]
    assert summary["tokens_per_s"] > 0
    test = read_json(tmp_path / "result.json")
    assert len(test.runs) == 9
    for run in test.runs:
        assert run.agrees_with_server
        assert run.requests == 10
        assert all(time.compute_ms > 0 for time in run.steps.values())
        if run.ttft_ms is not None:
            assert run.total_ms is not None
            assert run.ttft_ms.p50 < run.total_ms.p50
    assert sum(run.cached_images for run in test.runs) > 0
    assert (tmp_path / "report.html").exists()
    assert len((tmp_path / "result.csv").read_text().splitlines()) == 10


def test_a_run_fills_the_seconds_it_was_given(live_server: Any, tmp_path: Path) -> None:
    assert command.main(arguments(live_server, "--concurrency", "2", "--seconds", "4", "--out", str(tmp_path))) == 0
    (run,) = read_json(tmp_path / "result.json").runs
    assert 1 < run.seconds < 16  # other work on the machine may change the pace between measuring and running


def test_failed_requests_are_counted_and_named(
    live_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = ["--prompt-words", "20000", "--concurrency", "1", "--requests", "3", "--out", str(tmp_path)]
    assert command.main(arguments(live_server, *too_long)) == 1
    written = capsys.readouterr()
    assert json.loads(written.out.splitlines()[-1])["failed"] >= 1
    assert "tokens" in written.err.splitlines()[-1]
    assert "What went wrong" in (tmp_path / "report.html").read_text()
