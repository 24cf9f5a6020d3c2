# SPDX-License-Identifier: Apache-2.0
"""G4: whatever way a caller goes away, the server is told to stop, and it is told only then."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kimi_client import AsyncKimiClient, KimiClient, RequestTimeout, ServerUnavailable


def leave_by_break(kimi: KimiClient) -> None:
    for _ in kimi.stream("?", request_id="r"):
        break


def leave_by_close(kimi: KimiClient) -> None:
    stream = kimi.stream("?", request_id="r")
    next(stream)
    stream.close()


def leave_by_with(kimi: KimiClient) -> None:
    with kimi.stream("?", request_id="r") as stream:
        next(stream)


def leave_open(kimi: KimiClient) -> None:
    kimi.kept = kimi.stream("?", request_id="r")  # type: ignore[attr-defined]
    next(kimi.kept)  # type: ignore[attr-defined]


def leave_by_error(kimi: KimiClient) -> None:
    def fail_while_reading() -> None:
        for _ in kimi.stream("?", request_id="r"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_reading()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_with, leave_open, leave_by_error])
def test_g4_a_stream_left_early_is_cancelled_on_the_server(leave: Callable[[KimiClient], None], fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        leave(kimi)
    assert transport.cancelled_ids == ["r"]
    assert (transport.hung_up, transport.closed) == (1, 1)


def test_g4_an_asyncio_stream_left_early_is_cancelled_on_the_server(fake: Any) -> None:
    transport = fake()

    async def leave() -> None:
        async with AsyncKimiClient(transport=transport) as kimi:
            async for _ in kimi.stream("?", request_id="r"):
                break
            gc.collect()

    asyncio.run(leave())
    assert transport.cancelled_ids == ["r"]


def test_a_stream_read_to_its_last_chunk_is_not_cancelled(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        for chunk in kimi.stream("?"):
            if chunk.finish_reason:
                break
    assert transport.cancelled_ids == []


def test_g4_a_timeout_cancels_on_the_server(fake: Any) -> None:
    transport = fake(pause_s=5.0, embeds={})
    with KimiClient(transport=transport, timeout_s=0.05) as kimi:
        calls: list[Callable[[str], Any]] = [
            lambda name: kimi.ask("?", request_id=name),
            lambda name: list(kimi.stream("?", request_id=name)),
            lambda name: kimi.embed([b"x"], request_id=name),
            lambda name: kimi.chat([], request_id=name, timeout_s=0.01),
        ]
        for index, call in enumerate(calls):
            with pytest.raises(RequestTimeout, match=r"no answer within 0\.0\d+ s"):
                call(str(index))
    assert transport.cancelled_ids == ["0", "1", "2", "3"]


def test_the_timeout_of_a_stream_counts_for_each_piece(fake: Any) -> None:
    transport = fake(pause_s=0.1)
    with KimiClient(transport=transport, timeout_s=0.25) as kimi:
        assert len(list(kimi.stream("?"))) == 3  # 0.3 s in all


def test_an_infinite_timeout_waits(fake: Any) -> None:
    with KimiClient(transport=fake(pause_s=0.05), timeout_s=0.01) as kimi:
        assert kimi.ask("?", timeout_s=float("inf")).text == "c"


def test_g4_ctrl_c_cancels_on_the_server(fake: Any) -> None:
    transport = fake(pause_s=30.0)
    started = time.monotonic()
    with KimiClient(transport=transport) as kimi:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            kimi.ask("?", request_id="r")
    assert transport.cancelled_ids == ["r"]
    assert time.monotonic() - started < 5


def test_g4_a_cancelled_task_cancels_on_the_server(fake: Any) -> None:
    transport = fake(pause_s=30.0)

    async def give_up() -> None:
        async with AsyncKimiClient(transport=transport) as kimi:
            task = asyncio.create_task(kimi.ask("?", request_id="r"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())
    assert transport.cancelled_ids == ["r"]


def test_a_server_that_cannot_hear_the_cancel_does_not_hide_the_timeout(fake: Any) -> None:
    class Deaf(fake):  # type: ignore[misc]
        async def infer(self, request: Any) -> Any:
            raise ServerUnavailable(f"gone: {request.model}")

    with KimiClient(transport=Deaf(pause_s=5.0), timeout_s=0.05) as kimi, pytest.raises(RequestTimeout):
        kimi.ask("?")
