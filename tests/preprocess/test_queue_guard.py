# SPDX-License-Identifier: Apache-2.0
"""The guard refuses as many requests as wait too many, no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kimi_triton.errors import Unavailable
from kimi_triton.preprocess import queue_guard
from kimi_triton.preprocess.queue_guard import QueueGuard


@pytest.fixture
def metrics() -> Iterator[Any]:
    """A metrics endpoint whose number of waiting requests the test sets as `metrics.waiting`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lines = [
                'nv_inference_pending_request_count{model="moonvit",version="1"} 900',
                f'nv_inference_pending_request_count{{model="preprocess",version="1"}} {server.waiting}',  # type: ignore[attr-defined]
            ]
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.waiting = 0  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def guard(metrics: Any) -> QueueGuard:
    guard = QueueGuard(f"127.0.0.1:{metrics.server_address[1]}", "preprocess", num_instances=2, max_waiting=10)
    guard.stop()  # the tests look themselves
    return guard


def num_refused(guard: QueueGuard, num_requests: int) -> int:
    refused = 0
    for _ in range(num_requests):
        try:
            guard.refuse_excess()
        except Unavailable:
            refused += 1
    return refused


@pytest.mark.parametrize(("waiting", "expected"), [(0, 0), (10, 0), (11, 1), (30, 10), (31, 11)])
def test_g9_each_of_two_processes_refuses_half_of_the_excess(
    waiting: int, expected: int, guard: QueueGuard, metrics: Any
) -> None:
    metrics.waiting = waiting
    guard.look()
    assert num_refused(guard, 100) == expected


def test_refusing_ends_when_the_queue_is_short_again(guard: QueueGuard, metrics: Any) -> None:
    metrics.waiting = 500
    guard.look()
    assert num_refused(guard, 5) == 5
    metrics.waiting = 3
    guard.look()
    assert num_refused(guard, 5) == 0


def test_without_a_metrics_endpoint_nothing_is_refused_and_the_log_tells(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_guard, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(queue_guard, "WARN_AFTER", 3)
    guard = QueueGuard("127.0.0.1:1", "preprocess", num_instances=1, max_waiting=0)
    deadline = time.monotonic() + 10
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)
    guard.stop()
    assert num_refused(guard, 5) == 0
    assert "cannot be seen" in caplog.text
