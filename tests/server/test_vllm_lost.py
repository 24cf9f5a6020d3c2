# SPDX-License-Identifier: Apache-2.0
"""`kimi-triton serve --llm vllm` while its vLLM server hangs, dies and comes back: Triton itself keeps running.

The vLLM server is a stand-in that speaks its API; tests/vllm does the same with a real one.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_triton.serve.watch import STUCK_S
from tests.llm.fake_vllm import FakeVllm
from tests.system import System

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
LETTER = ord("a")
TIMEOUT_S = 10  # of silence, as --llm-timeout-s


@pytest.fixture(scope="module")
def vllm() -> Iterator[FakeVllm]:
    fake = FakeVllm(lambda _ids: LETTER, step_s=0.02, context=1024).start()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def system(vllm: FakeVllm, tiny_k25: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    options = ["--llm", "vllm", "--llm-url", vllm.url, "--llm-timeout-s", str(TIMEOUT_S)]
    running = System(tiny_k25, tmp_path_factory.mktemp("vllm_lost"), options)
    with running.process, running.log:
        running.wait(running.is_ready, 20)
        yield running
        running.process.terminate()


def test_a_hung_vllm_is_reported_and_triton_goes_on(system: System, vllm: FakeVllm) -> None:
    triton, llm = system.triton.pid, system.stub("llm").pid
    vllm.frozen = True
    system.wait(lambda: system.health_state()["state"] == "ill", 40)
    assert "vLLM" in system.health_state()["stages"]["llm"]["detail"]
    time.sleep(STUCK_S + 10)  # long enough for a watcher that takes it for a stuck model
    assert system.health_state()["state"] == "ill"
    vllm.frozen = False
    system.wait(system.is_ready, 40)
    assert system.ask()["text_output"] == "a" * 8
    assert (system.triton.pid, system.stub("llm").pid) == (triton, llm)
    assert system.health_state()["restarts"] == 0


def test_a_stream_ends_with_an_error_when_vllm_dies_and_the_next_request_is_answered(
    system: System, vllm: FakeVllm
) -> None:
    triton, llm = system.triton.pid, system.stub("llm").pid
    events: list[str] = []
    streaming = threading.Thread(target=lambda: events.extend(stream(system.http.removeprefix("http://"))))
    streaming.start()
    time.sleep(1)
    vllm.stop()
    streaming.join(TIMEOUT_S + 5)
    assert not streaming.is_alive()
    texts, last = events[:-1], events[-1]
    assert len(texts) > 5
    assert all(json.loads(text)["text_output"] for text in texts)
    assert "failed after" in json.loads(last)["error"]
    assert "vLLM" in system.ask()["error"]
    vllm.start()
    assert system.ask()["text_output"] == "a" * 8
    assert (system.triton.pid, system.stub("llm").pid) == (triton, llm)


def stream(address: str) -> list[str]:
    """JSON of each event of a long answer, the error at its end among them."""
    body = {"text_input": "Hello", "max_tokens": 900, "temperature": 0, "thinking": False, "stream": True}
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("POST", "/v2/models/kimi_vl/generate_stream", json.dumps(body))
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
