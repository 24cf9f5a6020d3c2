# SPDX-License-Identifier: Apache-2.0
"""Both clients over a transport that lives in the test: what they send, what they return, and when they cancel."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kimi_client
from kimi_client import AsyncKimiClient, InvalidRequest, KimiClient, RequestTimeout, ServerError, ServerUnavailable


def sent_options(transport: Any) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(transport.requests[0].inputs["sampling_parameters"][0])
    return options


def test_everything_public_can_be_imported() -> None:
    assert all(hasattr(kimi_client, name) for name in kimi_client.__all__)
    assert sorted(kimi_client.__all__) == kimi_client.__all__


def test_the_twins_take_the_same_arguments() -> None:
    names = [name for name, _ in inspect.getmembers(KimiClient, inspect.isfunction) if not name.startswith("_")]
    assert names == ["ask", "cancel", "chat", "close", "embed", "health", "stream"]
    for name in ["__init__", *names]:
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (KimiClient, AsyncKimiClient))
        assert ours.parameters == theirs.parameters, name


def test_ask_sends_text_images_and_options(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        answer = kimi.ask("What?", [b"png"], max_tokens=9, stop=["x"], request_id="mine")
    (request,) = transport.requests
    assert (request.model, request.request_id, answer.request_id) == ("kimi_vl", "mine", "mine")
    assert request.inputs["text_input"] == [b"What?"]
    assert request.inputs["image"] == [b"png"]
    assert sent_options(transport) == {"max_tokens": 9, "stop": ["x"], "stream": False}
    assert (answer.text, answer.finish_reason, answer.usage.completion_tokens) == ("c", "stop", 3)


def test_a_question_without_images_sends_no_image_tensor(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        kimi.ask("What?")
    assert set(transport.requests[0].inputs) == {"text_input", "sampling_parameters"}


def test_chat_sends_messages(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        kimi.chat([kimi_client.user_message("hi", [b"png"])], thinking=False)
    inputs = transport.requests[0].inputs
    assert json.loads(inputs["messages"][0])[0]["content"] == [{"type": "image"}, {"type": "text", "text": "hi"}]
    assert inputs["image"] == [b"png"]
    assert "text_input" not in inputs


def test_every_request_has_an_id_of_its_own(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        for _ in range(20):
            kimi.ask("?")
    assert len({request.request_id for request in transport.requests}) == 20


def test_stream_yields_pieces_and_then_knows_the_answer(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        stream = kimi.stream("What?")
        with pytest.raises(ServerError, match="without a finish reason"):
            _ = stream.answer
        chunks = list(stream)
    assert [str(chunk) for chunk in chunks] == ["a ", "b ", "c"]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]
    assert stream.answer.text == "a b c"
    assert sent_options(transport)["stream"] is True
    assert transport.cancelled_ids == []


def test_streams_over_asyncio(fake: Any) -> None:
    async def collect() -> tuple[str, str]:
        async with AsyncKimiClient(transport=fake()) as kimi:
            streamed = "".join([chunk.text async for chunk in kimi.stream("What?")])
            return streamed, (await kimi.ask("What?")).text

    assert asyncio.run(collect()) == ("a b c", "c")


def test_nothing_is_sent_before_the_first_piece_is_asked_for(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        kimi.stream("What?").close()
    assert transport.requests == []


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


def test_an_error_in_mid_stream_comes_after_the_pieces(fake: Any, make_response: Callable[..., Any]) -> None:
    transport = fake(pieces=[make_response("a ")], error=ServerError("the engine broke"))
    with KimiClient(transport=transport) as kimi:
        stream = kimi.stream("?")
        assert next(stream).text == "a "
        with pytest.raises(ServerError, match="the engine broke"):
            next(stream)
    assert transport.cancelled_ids == []  # the server has ended it by itself


def test_a_refused_request_raises_and_the_next_one_works(fake: Any) -> None:
    transport = fake(error=InvalidRequest("image 1: broken"))
    with KimiClient(transport=transport) as kimi:
        with pytest.raises(InvalidRequest, match="image 1: broken"):
            kimi.ask("?")
        transport.error = None
        assert kimi.ask("?").text == "c"


def test_options_that_are_no_json_are_refused_here(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        for options in ({"temperature": float("nan")}, {"stop": {"a"}}, {"seed": np.int64(3)}):
            with pytest.raises(InvalidRequest, match="options must be plain"):
                kimi.ask("?", **options)
        with pytest.raises(InvalidRequest, match="request_id must not be empty"):
            kimi.ask("?", request_id="")
        with pytest.raises(InvalidRequest, match="at least one image"):
            kimi.embed([])
    assert transport.requests == []


def test_embed_returns_one_array_per_image(fake: Any) -> None:
    grids = np.array([[[1, 8, 8], [1, 2, 4]]])
    transport = fake(embeds={"image_embeds": np.ones((1, 18, 4), np.float32), "image_grid_thw": grids})
    with KimiClient(transport=transport) as kimi:
        assert [rows.shape for rows in kimi.embed([b"a", b"b"])] == [(16, 4), (2, 4)]


def test_cancel_by_id_from_another_thread(fake: Any) -> None:
    transport = fake()
    with KimiClient(transport=transport) as kimi:
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(kimi.cancel("other")))
        thread.start()
        thread.join()
    assert (results, transport.cancelled_ids) == ([True], ["other"])


def test_many_threads_share_one_client(fake: Any) -> None:
    transport = fake(pause_s=0.1)
    with KimiClient(transport=transport) as kimi:
        started = time.monotonic()
        threads = [threading.Thread(target=kimi.ask, args=("?",)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert time.monotonic() - started < 1.0  # one after the other would take 1.6 s
    assert len(transport.requests) == 16


def test_closing_ends_the_thread_and_may_be_done_twice(fake: Any) -> None:
    before = threading.active_count()
    kimi = KimiClient(transport=fake())
    kimi.health()
    assert threading.active_count() == before + 1
    kimi.close()
    kimi.close()
    assert threading.active_count() == before


def test_a_client_that_is_dropped_hangs_up(fake: Any) -> None:
    transport = fake()
    KimiClient(transport=transport).ask("?")
    gc.collect()
    assert transport.closed == 1
