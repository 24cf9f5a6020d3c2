# SPDX-License-Identifier: Apache-2.0
"""G4 against a real server: work that nobody waits for any more ends."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from kimi_client import InvalidRequest, KimiClient, RequestCancelled, RequestTimeout

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def endless(live_server: Any) -> dict[str, Any]:
    """A question and options whose answer goes on until max_tokens: a penalty below 1 rewards repetition."""
    options = {"temperature": 0, "repetition_penalty": 0.5}
    with KimiClient(live_server.grpc_url) as client:
        for question in ("story", "x y z", "a", "hello", "b", "c", "d", "one", "tell"):
            if client.ask(question, max_tokens=300, **options).finish_reason == "length":  # type: ignore[arg-type]
                return {"prompt": question, "options": {**options, "max_tokens": 100_000}}
    raise AssertionError("no question has a long answer")


def is_running(kimi: KimiClient, request_id: str) -> bool:
    """Ids of live requests are refused, which shows from outside what still runs."""
    with suppress(RequestCancelled):  # an id is refused for a moment after it was cancelled, too
        try:
            kimi.ask("?", max_tokens=1, request_id=request_id)
        except InvalidRequest as error:
            return "still running" in str(error)
    return False


def stops_within(seconds: float, kimi: KimiClient, request_id: str) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(kimi, request_id):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_g4_a_stream_left_early_stops_on_the_server(kimi: KimiClient, endless: dict[str, Any]) -> None:
    with kimi.stream(endless["prompt"], **endless["options"]) as stream:
        for _ in range(5):
            next(stream)
        assert is_running(kimi, stream.request_id)
    assert stops_within(0.5, kimi, stream.request_id)


def test_g4_a_timeout_stops_on_the_server(kimi: KimiClient, endless: dict[str, Any]) -> None:
    with pytest.raises(RequestTimeout, match=r"no answer within 0\.5 s"):
        kimi.ask(endless["prompt"], timeout_s=0.5, request_id=f"timeout {id(kimi)}", **endless["options"])
    assert stops_within(0.5, kimi, f"timeout {id(kimi)}")


def test_cancel_by_id_ends_the_stream_of_another_reader(kimi: KimiClient, endless: dict[str, Any]) -> None:
    stream = kimi.stream(endless["prompt"], **endless["options"])
    next(stream)
    outcome: list[bool] = []
    canceller = threading.Timer(0.2, lambda: outcome.append(kimi.cancel(stream.request_id)))
    canceller.start()
    for _ in stream:
        pass
    canceller.join()
    assert outcome == [True]
    assert stream.answer.finish_reason == "cancelled"
    assert kimi.cancel(stream.request_id) is False
