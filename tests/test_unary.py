# SPDX-License-Identifier: Apache-2.0
"""The unary front without a server: whoever vanishes or runs out of time is posted on the board."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from kimi_triton.cancel_board import CancelBoard
from kimi_triton.errors import Cancelled, InvalidRequest, KimiError, Unavailable
from kimi_triton.unary import UnaryFront


class Sink:
    """A caller that refuses a second answer."""

    def __init__(self) -> None:
        self.gone = False
        self.outputs: Any = None
        self.error: Exception | None = None
        self.done = threading.Event()

    def send(self, outputs: Any, final: bool) -> None:
        assert final
        assert not self.done.is_set()
        self.outputs = outputs
        self.done.set()

    def fail(self, error: Exception) -> None:
        assert not self.done.is_set()
        self.error = error
        self.done.set()

    def is_cancelled(self) -> bool:
        return self.gone

    def wait(self) -> Any:
        assert self.done.wait(5)
        if self.error is not None:
            raise self.error
        return self.outputs


class Front(UnaryFront):
    """Answers by `answer` instead of asking a server."""

    def __init__(self, board: CancelBoard, max_live: int = 8) -> None:
        super().__init__("nowhere:1", board, max_live)
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[], Any] = lambda: {"text_output": np.zeros(1)}
        self.takes_s = 0.0

    async def _ask(self, request: dict[str, Any]) -> Any:
        self.asked.append(request)
        await asyncio.sleep(self.takes_s)
        return self.answer()

    def ask(self, request_id: str = "", timeout_s: float | None = None, **parameters: Any) -> Sink:
        sink = Sink()
        self.submit({"text_input": [b"Hello"], "image": None}, parameters, request_id, timeout_s, sink)
        return sink


@pytest.fixture
def board(tmp_path: Path) -> CancelBoard:
    return CancelBoard(tmp_path)


@pytest.fixture
def front(board: CancelBoard) -> Iterator[Front]:
    front = Front(board)
    yield front
    front.stop()


def test_a_request_is_passed_on_as_one_that_is_not_streamed(front: Front, board: CancelBoard) -> None:
    sink = front.ask("7", timeout_s=1.5, max_tokens=3, stream=True, sequence_id=0, timeout=1_500_000)
    assert sink.wait().keys() == {"text_output"}
    (request,) = front.asked
    assert request["request_id"] == "7"
    assert request["timeout"] == 1_500_000
    assert request["parameters"] == {"max_tokens": 3, "stream": False}
    assert [tensor.name() for tensor in request["inputs"]] == ["text_input"]
    assert not board.posted_files()


def test_requests_without_an_id_get_different_ones(front: Front) -> None:
    for _ in range(2):
        front.ask().wait()
    first, second = (request["request_id"] for request in front.asked)
    assert first != second


def test_errors_are_passed_on(front: Front) -> None:
    def fail() -> Any:
        raise InvalidRequest("image 0: bad")

    front.answer = fail
    with pytest.raises(InvalidRequest, match="image 0"):
        front.ask().wait()


def test_g4_a_caller_that_vanishes_is_posted(front: Front, board: CancelBoard) -> None:
    front.takes_s = 60
    sink = front.ask("7")
    sink.gone = True
    with pytest.raises(Cancelled):
        sink.wait()
    assert board.is_posted("7")


def test_g9_a_deadline_is_kept_whatever_the_steps_do(front: Front, board: CancelBoard) -> None:
    front.takes_s = 60
    start = time.monotonic()
    with pytest.raises(Unavailable, match=r"time limit of 0\.1 s"):
        front.ask("7", timeout_s=0.1).wait()
    assert time.monotonic() - start < 5
    assert board.is_posted("7")


def test_g9_more_callers_than_places_are_refused_and_places_come_back(board: CancelBoard) -> None:
    front = Front(board, max_live=2)
    front.takes_s = 0.2
    sinks = [front.ask() for _ in range(3)]
    with pytest.raises(Unavailable, match="2 unary requests are waiting"):
        sinks[2].wait()
    for sink in sinks[:2]:
        sink.wait()
    front.ask().wait()
    front.stop()


def test_stopping_answers_everybody(board: CancelBoard) -> None:
    front = Front(board)
    front.takes_s = 60
    sinks = [front.ask(str(index)) for index in range(5)]
    front.stop()
    for sink in sinks:
        with pytest.raises(Unavailable, match="stopping"):
            sink.wait()


class EndingCall:
    """A gRPC stream with one answer, which tells whether it was read to its end or cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.was_read_to_the_end = False
        self.was_cancelled = False

    async def __aiter__(self) -> Any:
        result = SimpleNamespace(
            get_response=lambda: SimpleNamespace(outputs=[SimpleNamespace(name="text_output")]),
            as_numpy=lambda _name: np.ones(1),
        )
        yield result, self.error
        await asyncio.sleep(0.05)  # the end comes on its own
        self.was_read_to_the_end = True

    def cancel(self) -> None:
        self.was_cancelled = True


def ask_over(call: EndingCall, board: CancelBoard) -> Sink:
    front = UnaryFront("nowhere:1", board, 8)
    front._client = SimpleNamespace(stream_infer=lambda _requests: call, close=lambda: asyncio.sleep(0))  # type: ignore[assignment]
    sink = Sink()
    front.submit({"text_input": [b"Hello"]}, {}, "7", None, sink)
    assert sink.done.wait(5)
    front.stop()
    return sink


def test_a_stream_is_read_to_its_end_since_a_cancelled_one_costs_the_server_memory(board: CancelBoard) -> None:
    call = EndingCall()
    assert ask_over(call, board).wait().keys() == {"text_output"}
    assert (call.was_read_to_the_end, call.was_cancelled) == (True, False)


def test_so_is_a_stream_that_brings_an_error(board: CancelBoard) -> None:
    call = EndingCall(InferenceServerException("image 0: bad"))
    with pytest.raises(KimiError, match="image 0: bad"):
        ask_over(call, board).wait()
    assert (call.was_read_to_the_end, call.was_cancelled) == (True, False)
