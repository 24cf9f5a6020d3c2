# SPDX-License-Identifier: Apache-2.0
"""Both endpoints are served by the test, in Triton's form."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kimi_client import ServerUnavailable
from kimi_client.load.server_figures import COMPLETION_TOKENS, StepTime, read_figures, server_version, settled_figures

MS = 1_000_000


def model(name: str, count: int, total_ms: float, queue_ms: float, compute_ms: float) -> dict[str, Any]:
    def phase(mean_ms: float) -> dict[str, int]:
        return {"count": count, "ns": int(mean_ms * MS) * count}

    statistics = {"success": phase(total_ms), "fail": {"count": 2, "ns": 9}, "queue": phase(queue_ms)}
    computing = {"compute_input": phase(0), "compute_infer": phase(compute_ms), "compute_output": phase(0)}
    return {"name": name, "inference_stats": statistics | computing}


@pytest.fixture
def served() -> Iterator[tuple[str, dict[str, str]]]:
    pages: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[self.path].encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}", pages
        server.shutdown()
        thread.join()


def statistics(count: int) -> str:
    models = [
        model("kimi_vl", count, 100, 0, 1),
        model("preprocess", count, 6, 1, 5),
        model("moonvit", count, 30, 10, 20),
        model("llm", count, 2, 1, 1),
    ]
    return json.dumps({"model_stats": models})


METRICS = """# HELP {name} Tokens
# TYPE {name} counter
{name}{{model="llm",version="1"}} {first}
{name}{{model="llm2",version="1"}} 2
nv_other 3.5e2
"""


def test_the_difference_of_two_readings_is_what_happened_between(served: tuple[str, dict[str, str]]) -> None:
    address, pages = served
    pages["/v2/models/stats"], pages["/metrics"] = statistics(4), METRICS.format(name=COMPLETION_TOKENS, first=10)
    before = read_figures(address, address)
    pages["/v2/models/stats"], pages["/metrics"] = statistics(7), METRICS.format(name=COMPLETION_TOKENS, first=34)
    between = read_figures(address, address).since(before)
    assert (between.count("kimi_vl", "success"), between.count("kimi_vl", "fail")) == (3, 0)
    assert between.metrics[COMPLETION_TOKENS] == 24
    assert between.metrics["nv_other"] == 0
    assert between.mean_ms("kimi_vl", "success") == 100


def test_the_llm_gets_what_the_other_steps_did_not_take(served: tuple[str, dict[str, str]]) -> None:
    address, pages = served
    pages["/v2/models/stats"], pages["/metrics"] = statistics(5), ""
    steps = read_figures(address, address).step_times("kimi_vl")
    assert steps == {"preprocess": StepTime(1, 5), "moonvit": StepTime(10, 20), "llm": StepTime(1, 63)}


def test_a_model_that_is_not_there_counts_nothing(served: tuple[str, dict[str, str]]) -> None:
    address, pages = served
    pages["/v2/models/stats"], pages["/metrics"] = json.dumps({"model_stats": []}), ""
    reading = read_figures(address, address)
    assert (reading.count("kimi_vl", "success"), reading.mean_ms("kimi_vl", "success")) == (0, 0.0)


def test_counts_are_read_until_they_stand_still(served: tuple[str, dict[str, str]]) -> None:
    address, pages = served
    pages["/v2/models/stats"], pages["/metrics"] = statistics(4), METRICS.format(name=COMPLETION_TOKENS, first=10)

    def publish() -> None:
        pages["/metrics"] = METRICS.format(name=COMPLETION_TOKENS, first=90)

    late = threading.Timer(0.1, publish)  # while the first two readings are taken
    late.start()
    assert settled_figures(address, address).metrics[COMPLETION_TOKENS] == 92
    late.join()


def test_nobody_there_is_one_clear_error() -> None:
    with pytest.raises(ServerUnavailable, match=r"cannot read http://127\.0\.0\.1:9/v2: "):
        server_version("127.0.0.1:9")
