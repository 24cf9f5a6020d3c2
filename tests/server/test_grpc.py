# SPDX-License-Identifier: Apache-2.0
"""The gRPC side of a live server: unary, streaming, several requests on one stream."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.server
QUESTION = "What is in this picture?"
GREEDY = {"temperature": 0, "max_tokens": 12, "thinking": False}


def test_stream_pieces_join_to_the_unary_answer(caller: Any, png: Any) -> None:
    images = [png(56, 84)]
    streamed = caller.ask(QUESTION, images, stream=True, **GREEDY)
    whole = caller.unary(QUESTION, images, **GREEDY)
    assert streamed.text == whole["text_output"].decode()
    assert streamed.finals == [False] * (len(streamed.finals) - 1) + [True]
    assert streamed.last["finish_reason"] == whole["finish_reason"]
    assert streamed.last["completion_tokens"] == whole["completion_tokens"]
    assert len(streamed.texts) > 1


def test_an_unstreamed_answer_is_one_response_that_is_final(caller: Any) -> None:
    answer = caller.ask(QUESTION, **GREEDY)
    assert answer.finals == [True]
    assert answer.last["finish_reason"] in (b"stop", b"length")


def test_raw_and_base64_images_give_one_answer(caller: Any, png: Any) -> None:
    image = png(84, 56)
    raw = caller.unary(QUESTION, [image], **GREEDY)
    encoded = caller.unary(QUESTION, [base64.b64encode(image)], **GREEDY)
    assert raw["text_output"] == encoded["text_output"]


def test_several_requests_on_one_stream_keep_their_own_answers(caller: Any, png: Any) -> None:
    from tests.server.conftest import request_inputs

    images = {f"request-{number}": png(28 * (number + 1), 56, seed=number) for number in range(5)}
    requests = [
        {"request_id": name, "inputs": request_inputs(QUESTION, [image]), "parameters": GREEDY | {"stream": True}}
        for name, image in images.items()
    ]
    together = caller.stream(requests)
    for name, image in images.items():
        assert together[name].text == caller.unary(QUESTION, [image], **GREEDY)["text_output"].decode(), name
        assert together[name].finals.count(True) == 1


def test_several_images_keep_their_order(caller: Any, png: Any) -> None:
    sizes = [(56, 56), (28, 84), (112, 28), (29, 27)]
    images = [png(*size, seed=seed) for seed, size in enumerate(sizes)]
    apart = [caller.embed([image])[0] for image in images]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        rows, grid = caller.embed([images[place] for place in order])
        assert np.allclose(rows, np.concatenate([apart[place] for place in order]), atol=0.05)
        assert grid.prod(1).sum() == 4 * len(rows)
    assert [len(rows) for rows in apart] == [4, 3, 4, 2]


def test_images_stand_where_messages_put_them(caller: Any, png: Any) -> None:
    first, second = png(56, 56, seed=1), png(56, 56, seed=2)
    content = [{"type": "text", "text": "A:"}, {"type": "image"}, {"type": "text", "text": "B:"}, {"type": "image"}]
    messages = [{"role": "user", "content": content}]
    answers = [
        caller.unary(None, images, messages, **GREEDY)["text_output"] for images in ([first, second], [second, first])
    ]
    assert answers[0] != answers[1]
    assert answers[0] == caller.unary(None, [first, second], messages, **GREEDY)["text_output"]


def test_b4_eight_sizes_at_once_answer_as_one_by_one(caller: Any, png: Any) -> None:
    sizes = [(28, 28), (57, 33), (224, 224), (100, 100), (29, 27), (400, 80), (13, 13), (640, 48)]
    images = [png(*size, seed=seed) for seed, size in enumerate(sizes)]

    def answer(image: bytes) -> bytes:
        text: bytes = caller.unary(QUESTION, [image], **GREEDY)["text_output"]
        return text

    serial = [answer(image) for image in images]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, images)) == serial


def test_64_unary_calls_at_once_all_answer(caller: Any, png: Any) -> None:
    image = png(56, 56)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: caller.unary(QUESTION, [image], **GREEDY)["text_output"], range(64)))
    assert len(set(answers)) == 1


def test_a_seed_repeats_the_answer_and_no_seed_does_not(caller: Any) -> None:
    sampled = {"temperature": 1.0, "max_tokens": 12, "thinking": False}
    seeded = {caller.unary(QUESTION, seed=42, **sampled)["text_output"] for _ in range(3)}
    free = {caller.unary(QUESTION, **sampled)["text_output"] for _ in range(3)}
    assert len(seeded) == 1
    assert len(free) > 1


def test_g7_embeddings_are_bf16_rows_of_the_text_width(caller: Any, png: Any) -> None:
    rows, grid = caller.embed([png(100, 100)])
    assert rows.shape == (16, 128)
    assert grid.tolist() == [[1, 8, 8]]
    assert np.isfinite(rows).all()
    assert rows.std() > 0.01


def test_both_families_are_served(caller_vl: Any, png: Any) -> None:
    answer = caller_vl.unary(QUESTION, [png(640, 480)], temperature=0, max_tokens=8)
    assert answer["completion_tokens"] >= 1
    # 414 pads, the wrapper of 4 - 1, and the template around the question
    assert answer["prompt_tokens"] > 414
    streamed = caller_vl.ask(QUESTION, [png(640, 480)], temperature=0, max_tokens=8, stream=True)
    assert streamed.text == answer["text_output"].decode()
