# SPDX-License-Identifier: Apache-2.0
"""Both clients over a transport that lives in the test: what they send and what they return."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kimi_client
from kimi_client import AsyncKimiClient, InvalidRequest, KimiClient, ServerError


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
