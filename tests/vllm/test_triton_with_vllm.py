# SPDX-License-Identifier: Apache-2.0
"""The whole ensemble on a real Triton server whose language model runs in a real vLLM server."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LiveServer, started
from tests.server.conftest import Answer, Caller
from tests.vllm.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(1200)]
QUESTION = "What is in this picture?"
STALL_TIMEOUT_S = 20


@pytest.fixture(scope="module")
def triton(
    vllm_server: VllmProcess, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    options = {"llm": "vllm", "llm_url": [vllm_server.url], "llm_timeout_s": STALL_TIMEOUT_S}
    with started(checkpoint, tmp_path_factory.mktemp("triton"), **options) as server:
        yield server


@pytest.fixture
def caller(triton: LiveServer) -> Caller:
    return Caller(triton.http_url, triton.grpc_url)


def test_streamed_and_whole_answers_agree_and_depend_on_the_picture(caller: Caller, png: Any) -> None:
    texts: list[bytes] = []
    for seed in (1, 2, 1):
        images = [png(56, 84, seed=seed)]
        streamed = caller.ask(QUESTION, images, stream=True, temperature=0, max_tokens=16)
        whole = caller.unary(QUESTION, images, temperature=0, max_tokens=16)
        assert streamed.text == whole["text_output"].decode()
        assert streamed.finals == [False] * (len(streamed.finals) - 1) + [True]
        assert streamed.last["completion_tokens"] == whole["completion_tokens"]
        texts.append(whole["reasoning_output"] + whole["text_output"])
    assert texts[0] == texts[2] != texts[1]


def test_a_request_that_is_too_long_is_refused_with_the_servers_context(caller: Caller) -> None:
    answer = caller.ask("word " * 3000, max_tokens=1)
    assert answer.error is not None
    assert "context of 1024" in str(answer.error)


def test_vllm_is_killed_while_it_answers_and_started_again(
    caller: Caller, triton: LiveServer, vllm_server: VllmProcess
) -> None:
    answers: list[Answer] = []
    long = {"stream": True, "temperature": 0, "max_tokens": 900}
    asking = threading.Thread(target=lambda: answers.append(caller.ask("Tell me a story", **long)))
    asking.start()
    while not vllm_server.num_running():
        time.sleep(0.02)
    time.sleep(0.3)
    vllm_server.kill()
    killed_at = time.monotonic()
    asking.join(timeout=STALL_TIMEOUT_S + 10)
    assert time.monotonic() - killed_at < STALL_TIMEOUT_S
    assert answers[0].error is not None
    assert "unavailable, try again: " in str(answers[0].error)
    refused = caller.ask("Hello", max_tokens=2)
    assert "no vLLM server could answer" in str(refused.error)
    assert healthy(triton) == 0
    vllm_server.start()
    answer = caller.ask("Hello", max_tokens=2)
    assert answer.error is None
    assert answer.finals == [True]
    assert healthy(triton) == 1


def healthy(triton: LiveServer) -> float:
    """What the metrics say, at most one look of the engine later."""
    time.sleep(5)
    with urllib.request.urlopen(f"http://{triton.metrics_url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("kimi_llm_healthy{"))
