# SPDX-License-Identifier: Apache-2.0
"""What the body of an answer says about a stage."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kimi_triton.errors import KimiError, Unavailable, error_text
from kimi_triton.serve.probes import STAGES, judge, probe


def test_an_answer_without_error_is_ok() -> None:
    assert judge("llm", '{"text_output": "a"}').state == "ok"


@pytest.mark.parametrize("name", ["moonvit_0_0", "moonvit_1_0", "moonvit_0"])
def test_a_dead_process_is_named_by_any_stage(name: str) -> None:
    error = f"in ensemble 'kimi_vl', Stub process '{name}' is not healthy."
    finding = judge("llm", json.dumps({"error": error}))
    assert (finding.stage, finding.state, finding.certain) == ("moonvit", "ill", True)


def test_the_unary_front_has_underscores_in_its_name() -> None:
    finding = judge("kimi_vl_unary", '{"error": "Stub process \'kimi_vl_unary_0_0\' is not healthy."}')
    assert finding.stage == "kimi_vl_unary"


@pytest.mark.parametrize(
    "error", ["Exceeds maximum queue size", error_text(Unavailable("256 requests are waiting already"))]
)
def test_a_full_queue_is_no_illness(error: str) -> None:
    assert judge("llm", json.dumps({"error": error})).state == "busy"


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("no vLLM server could answer: http://a:1: refused"),
        Unavailable("vLLM gave no token within the time limit of the request"),
        KimiError("vLLM at http://a:1 refused the request with HTTP 400: no"),
    ],
)
def test_a_vllm_server_that_fails_is_ill_but_not_here(error: KimiError) -> None:
    finding = judge("llm", json.dumps({"error": f"in ensemble 'kimi_vl', {error_text(error)}"}))
    assert (finding.state, finding.certain, finding.elsewhere) == ("ill", False, True)


@pytest.mark.parametrize("text", ["", "<html>", '{"error": "internal error: RuntimeError"}', "[]"])
def test_anything_else_is_ill_but_not_certainly(text: str) -> None:
    finding = judge("llm", text)
    assert (finding.state, finding.certain) == ("ill", False)


@pytest.fixture
def deaf() -> Iterator[str]:
    """A server that answers every request with status 500 and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("stage", STAGES)
def test_no_server_and_an_empty_answer_are_ill(stage: str, deaf: str) -> None:
    assert probe(deaf, stage, 5).state == "ill"
    assert probe("127.0.0.1:1", stage, 5).state == "ill"
