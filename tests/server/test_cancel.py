# SPDX-License-Identifier: Apache-2.0
"""Requests that are no longer wanted, on a live server: they stop wherever they are and leave nothing behind."""

from __future__ import annotations

import asyncio
import queue
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from safetensors.torch import load_file, save_file
from tritonclient.utils import InferenceServerException

from kimi_client import AsyncKimiClient, KimiClient, KimiClientError
from kimi_triton.checkpoint import Checkpoint
from kimi_triton.text.stop_ids import stop_token_ids
from kimi_triton.text.tokenizer import KimiTokenizer
from tests.conftest import started
from tests.server.conftest import Caller, bytes_input, request_inputs

pytestmark = pytest.mark.server
QUESTION = "Tell me a story"
HEAD = "language_model.lm_head.weight"
LONG = {"temperature": 0.3, "seed": 3, "max_tokens": 4000, "thinking": False}


@pytest.fixture(scope="module")
def live_server(tiny_k25: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server whose model does not end its answers by itself: the logits of its stop tokens are zero, far below those
    of the likely tokens."""
    folder = tmp_path_factory.mktemp("talkative") / "checkpoint"
    shutil.copytree(tiny_k25, folder)
    checkpoint = Checkpoint(folder)
    tokenizer = KimiTokenizer.from_checkpoint(folder, checkpoint.config)
    stop_ids = sorted(stop_token_ids(folder, checkpoint.config, tokenizer))
    shard = checkpoint.tensors[HEAD].file
    weights = load_file(shard)
    weights[HEAD][stop_ids] = 0
    save_file(weights, shard, metadata={"format": "pt"})
    with started(folder, tmp_path_factory.mktemp("server_talkative")) as server:
        yield server


@pytest.fixture
def caller(live_server: Any) -> Caller:
    return Caller(live_server.http_url, live_server.grpc_url)


class Streaming:
    """One streamed request on a connection of its own, read by the test piece by piece."""

    def __init__(self, grpc_url: str, request_id: str, images: list[bytes] | None = None, **options: Any) -> None:
        self.tokens, self.reason = 0, b""
        self.arrivals: list[float] = []
        self._events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = grpcclient.InferenceServerClient(grpc_url)
        self.client.start_stream(callback=self._take)
        timeout = options.pop("timeout", None)
        self.client.async_stream_infer(
            "kimi_vl",
            request_inputs(QUESTION, images),
            request_id=request_id,
            parameters=LONG | {"stream": True} | options,
            timeout=timeout,
            enable_empty_final_response=True,
        )

    def _take(self, result: Any, error: Any) -> None:
        self.arrivals.append(time.monotonic())
        self._events.put((result, error))

    def read(self, until: int = 10**9) -> bytes:
        """Read up to a number of tokens or the end; returns the finish reason. Raises what the server sent."""
        while self.tokens < until:
            result, error = self._events.get(timeout=60)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                self.tokens = int(result.as_numpy("completion_tokens")[0])
                self.reason = result.as_numpy("finish_reason")[0]
            if response.parameters["triton_final_response"].bool_param:
                break
        return self.reason

    def __enter__(self) -> Streaming:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def cancel(server: Any, request_id: str) -> bool:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        result = client.infer("kimi_cancel", [bytes_input("request_id", [request_id.encode()])])
        return bool(result.as_numpy("cancelled")[0])


def metrics(server: Any) -> dict[str, float]:
    """Our own counters and gauges, summed over instances."""
    text = urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10).read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^(kimi_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0) + float(value)
    return found


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_idle(server: Any) -> bool:
    """Whether the language model works on nothing, and goes on doing so."""
    before = metrics(server)
    time.sleep(0.3)
    after = metrics(server)
    busy = [after["kimi_llm_running"], after["kimi_llm_waiting"]]
    return busy == [0, 0] and before["kimi_llm_completion_tokens"] == after["kimi_llm_completion_tokens"]


def test_g4_a_streamed_answer_stops_within_three_tokens(live_server: Any) -> None:
    with Streaming(live_server.grpc_url, "stop-me") as streaming:
        streaming.read(until=5)
        assert cancel(live_server, "stop-me")
        cancelled_at = time.monotonic()
        assert streaming.read() == b"cancelled"
        assert sum(arrival > cancelled_at for arrival in streaming.arrivals) <= 3
        assert streaming.tokens < 1000
    assert not cancel(live_server, "stop-me")
    until(lambda: is_idle(live_server))


def test_g4_a_late_cancellation_leaves_the_next_request_of_its_id_alone(live_server: Any) -> None:
    for _ in range(2):
        with Streaming(live_server.grpc_url, "again", max_tokens=3) as streaming:
            assert streaming.read() in (b"length", b"stop")
        assert not cancel(live_server, "again")


def test_g4_a_cancelled_whole_answer_is_a_short_answer(live_server: Any, caller: Any) -> None:
    def ask() -> dict[str, Any]:
        with grpcclient.InferenceServerClient(live_server.grpc_url) as client:
            result = client.infer("kimi_vl_unary", request_inputs(QUESTION, None), request_id="whole", parameters=LONG)
            return {name: result.as_numpy(name)[0] for name in ("finish_reason", "completion_tokens")}

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        until(lambda: metrics(live_server)["kimi_llm_running"] == 1)
        assert cancel(live_server, "whole")
        assert answer.result()["finish_reason"] == b"cancelled"
    assert caller.unary(QUESTION, max_tokens=1)["completion_tokens"] == 1


def test_g4_a_unary_caller_that_vanishes_stops_the_work(live_server: Any) -> None:
    before = metrics(live_server)["kimi_llm_cancelled"]
    with grpcclient.InferenceServerClient(live_server.grpc_url) as client:
        inputs = request_inputs(QUESTION, None)
        call = client.async_infer("kimi_vl_unary", inputs, callback=lambda **_: None, parameters=LONG)
        until(lambda: metrics(live_server)["kimi_llm_running"] == 1)
        call.cancel()
        until(lambda: metrics(live_server)["kimi_llm_cancelled"] == before + 1)
    until(lambda: is_idle(live_server))


def test_g4_vision_work_of_a_cancelled_request_is_skipped(live_server: Any, png: Any) -> None:
    before = metrics(live_server)["kimi_vision_images"]
    for model in ("kimi_vision", "kimi_vl_unary"):
        assert not cancel(live_server, f"early-{model}")
        inputs = [bytes_input("image", [png(56, 56, seed=99)])]
        if model == "kimi_vl_unary":
            inputs += request_inputs(QUESTION, None)
        with (
            grpcclient.InferenceServerClient(live_server.grpc_url) as client,
            pytest.raises(InferenceServerException, match="cancelled"),
        ):
            client.infer(model, inputs, request_id=f"early-{model}")
    assert metrics(live_server)["kimi_vision_images"] == before


def test_an_id_that_is_live_is_refused(live_server: Any) -> None:
    with Streaming(live_server.grpc_url, "twin") as first:
        first.read(until=2)
        with (
            Streaming(live_server.grpc_url, "twin") as second,
            pytest.raises(InferenceServerException, match="request id 'twin' belongs to a request that is still"),
        ):
            second.read()
        assert cancel(live_server, "twin")
        assert first.read() == b"cancelled"


@pytest.mark.parametrize("model", ["kimi_vl", "kimi_vl_unary"])
def test_g9_a_request_ends_near_its_deadline(model: str, live_server: Any) -> None:
    start = time.monotonic()
    if model == "kimi_vl":
        with Streaming(live_server.grpc_url, "late", timeout=500_000) as streaming:
            assert streaming.read() == b"deadline"
    else:
        with grpcclient.InferenceServerClient(live_server.grpc_url) as client:
            result = client.infer(model, request_inputs(QUESTION, None), parameters=LONG, timeout=500_000)
        assert result.as_numpy("finish_reason")[0] == b"deadline"
    assert 0.4 < time.monotonic() - start < 3
    until(lambda: is_idle(live_server))


def test_g4_200_clients_that_vanish_leave_no_work_behind(live_server: Any, png: Any) -> None:
    """A quarter each: leaves a stream after a piece, times out, is interrupted, never reads."""
    image = png(56, 56)

    async def leave(client: AsyncKimiClient, number: int) -> None:
        images = [image] if number % 2 else []
        options = {"temperature": 0.3, "max_tokens": 4000, "seed": number}
        kind = number % 4
        try:
            if kind == 0:
                async for _ in client.stream(QUESTION, images, **options):
                    break
            elif kind == 1:
                await client.ask(QUESTION, images, timeout_s=0.05, **options)
            elif kind == 2:
                await asyncio.wait_for(client.ask(QUESTION, images, **options), 0.05 + number / 1000)
            else:
                stream = client.stream(QUESTION, images, **options)
                await asyncio.sleep(0.01)
                await stream.close()
        except (KimiClientError, asyncio.TimeoutError):
            pass

    async def all_leave() -> None:
        async with AsyncKimiClient(live_server.grpc_url, timeout_s=120) as client:
            for start in range(0, 200, 50):
                await asyncio.gather(*(leave(client, number) for number in range(start, start + 50)))

    asyncio.run(all_leave())
    until(lambda: is_idle(live_server), timeout_s=60)
    with KimiClient(live_server.grpc_url) as client:
        assert client.ask(QUESTION, [image], max_tokens=3, temperature=0).usage.completion_tokens >= 1
        assert client.health().is_ready


def test_metrics_tell_tokens_and_times(live_server: Any, caller: Any) -> None:
    until(lambda: is_idle(live_server))
    before = metrics(live_server)
    answer = caller.unary(QUESTION, max_tokens=6, temperature=0)
    time.sleep(0.2)
    after = metrics(live_server)
    grown = {name.removeprefix("kimi_llm_"): after[name] - before[name] for name in after if name in before}
    assert grown["requests"] == 1
    assert grown["completion_tokens"] == answer["completion_tokens"]
    assert grown["prompt_tokens"] == answer["prompt_tokens"]
    assert grown["time_to_first_token_ms_count"] == 1
    assert grown["inter_token_ms_count"] == answer["completion_tokens"] - 1
    assert 0 < grown["time_to_first_token_ms_sum"] < 30_000
    assert after["kimi_llm_healthy"] == 1
