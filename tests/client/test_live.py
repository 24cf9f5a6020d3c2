# SPDX-License-Identifier: Apache-2.0
"""Both clients against a real server, over both protocols."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image

from kimi_client import (
    Answer,
    AsyncKimiClient,
    InvalidRequest,
    KimiClient,
    user_message,
)

pytestmark = pytest.mark.server
T = TypeVar("T")

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    packed = io.BytesIO()
    image.save(packed, "PNG")
    return packed.getvalue()


def said(answer: Answer) -> tuple[Any, ...]:
    """Everything of an answer but its id and what the cache did."""
    usage = answer.usage
    return answer.text, answer.reasoning, answer.finish_reason, usage.prompt_tokens, usage.completion_tokens


async def settled(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value


def test_the_server_is_healthy(kimi: KimiClient) -> None:
    health = kimi.health()
    assert health.is_live
    assert health.is_ready
    assert health.models == {"kimi_vl": True, "kimi_vl_unary": True, "kimi_vision": True}
    assert health.server_version.startswith("2.")


def test_ask_stream_and_chat_give_one_answer_on_all_ways(live_server: Any) -> None:
    picture = noise(80, 60)
    answers: dict[str, Answer] = {}

    async def collect(way: str, client: Any) -> None:
        question, messages = "What is this?", [user_message("What is this?", [picture])]
        answers[f"{way} ask"] = await settled(client.ask(question, [picture], **GREEDY))
        answers[f"{way} chat"] = await settled(client.chat(messages, **GREEDY))
        for name, prompt, images in (("text", question, [picture]), ("messages", messages, [])):
            stream = client.stream(prompt, images, **GREEDY)
            chunks = [chunk async for chunk in stream] if isinstance(client, AsyncKimiClient) else list(stream)
            assert len(chunks) > 3
            answers[f"{way} stream of {name}"] = stream.answer

    async def collect_async(way: str, url: str) -> None:
        async with AsyncKimiClient(url) as client:
            await collect(way, client)

    for protocol, url in (("grpc", live_server.grpc_url), ("http", f"http://{live_server.http_url}")):
        with KimiClient(url) as client:
            asyncio.run(collect(protocol, client))
        asyncio.run(collect_async(f"{protocol} asyncio", url))
    assert len(answers) == 16
    assert len({said(answer) for answer in answers.values()}) == 1, answers


def test_every_form_of_a_picture_gives_one_answer(kimi: KimiClient, tmp_path: Path) -> None:
    image = noise(60, 80)
    (tmp_path / "x.png").write_bytes(png(image))
    data_url = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    forms: list[Any] = [image, np.asarray(image), png(image), tmp_path / "x.png", str(tmp_path / "x.png"), data_url]
    answers = {said(kimi.ask("What?", [form], **GREEDY)) for form in forms}
    assert len(answers) == 1
    assert said(kimi.ask("What?", [noise(60, 80, seed=1)], **GREEDY)) not in answers


def test_embed_returns_rows_per_image_and_the_same_rows_alone(kimi: KimiClient) -> None:
    # Sizes and token counts of the reference table in the field cases.
    sizes = {(224, 224): 64, (640, 480): 414, (29, 27): 2, (1, 1): 1}
    images = [noise(*size) for size in sizes]
    together = kimi.embed(images)
    assert [rows.shape[0] for rows in together] == list(sizes.values())
    assert {rows.shape[1] for rows in together} == {together[0].shape[1]}
    for image, rows in zip(images, together, strict=True):
        assert rows.dtype == np.float32
        assert np.allclose(kimi.embed([image])[0], rows, atol=0.05)
    assert not np.allclose(together[0][:2], together[2])


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        (["?", [b"no picture"]], {}, "^image 0: "),
        (["?", [png(noise(30, 30)), png(noise(30, 30))[:-40]]], {}, "^image 1: "),
        (["?"], {"max_token": 3}, "max_token"),
        (["?"], {"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_request_is_named_and_the_next_is_answered(
    arguments: list[Any], options: dict[str, Any], reason: str, kimi: KimiClient
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        kimi.ask(*arguments, **options)
    with pytest.raises(InvalidRequest, match=reason):
        list(kimi.stream(*arguments, **options))
    assert kimi.ask("?", max_tokens=2).usage.completion_tokens > 0


def test_a5_embed_names_the_image(kimi: KimiClient) -> None:
    with pytest.raises(InvalidRequest, match=r"^image 1: "):
        kimi.embed([png(noise(30, 30)), b"no picture"])


@pytest.mark.parametrize("megabytes", [5, 40])
def test_g2_large_payloads_arrive(megabytes: int, kimi: KimiClient) -> None:
    padded = png(noise(30, 30)) + bytes(megabytes << 20)  # what follows a PNG is ignored
    assert kimi.ask("?", [padded], max_tokens=1).usage.completion_tokens == 1
    assert len(list(kimi.stream("?", [padded], max_tokens=1))) == 1


def test_sixteen_at_once_answer_as_one_by_one(url: str) -> None:
    questions = [(f"What is {i}?", [noise(28 + 14 * i, 56, seed=i)] if i % 2 else []) for i in range(16)]

    async def ask_all() -> tuple[list[Answer], list[Answer]]:
        async with AsyncKimiClient(url) as client:
            serial = [await client.ask(text, images, **GREEDY) for text, images in questions]
            return serial, await asyncio.gather(*(client.ask(text, images, **GREEDY) for text, images in questions))

    serial, together = asyncio.run(ask_all())
    assert [said(answer) for answer in together] == [said(answer) for answer in serial]


def test_logprobs_come_for_every_token_when_asked_for(kimi: KimiClient) -> None:
    answer = kimi.ask("hi", logprobs=True, **GREEDY)
    assert len(answer.logprobs) == answer.usage.completion_tokens
    assert all(value <= 0 for value in answer.logprobs)
    assert kimi.ask("hi", **GREEDY).logprobs == ()


def test_reading_bf16_is_fast_enough_for_large_pictures(kimi: KimiClient) -> None:
    picture = noise(1400, 1400)
    kimi.embed([picture])  # from the cache from now on
    started = time.monotonic()
    (rows,) = kimi.embed([picture])
    seconds = time.monotonic() - started
    assert rows.shape[0] == 2500
    assert seconds < 5, f"{rows.size} values took {seconds:.1f} s"
