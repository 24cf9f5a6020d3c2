# SPDX-License-Identifier: Apache-2.0
"""A wrong request gets INVALID_ARGUMENT with a message that helps; the server answers the next one as always."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server
QUESTION = "What is in this picture?"
GREEDY = {"temperature": 0, "max_tokens": 6, "thinking": False}

PART = {"type": "image"}
DEEP = "[" * 10_000 + "]" * 10_000


@pytest.fixture(autouse=True)
def known_good(caller: Any, png: Any) -> Any:
    """Every case is followed by a request that must answer as it did before."""
    before = caller.unary(QUESTION, [png(56, 56)], **GREEDY)["text_output"]
    yield
    assert caller.unary(QUESTION, [png(56, 56)], **GREEDY)["text_output"] == before


def refused(caller: Any, text: str | None, images: list[bytes] | None, *words: str, **more: Any) -> None:
    """The same words reach unary gRPC, a gRPC stream and HTTP."""
    with pytest.raises(InferenceServerException) as caught:
        caller.unary(text, images, **more)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT", caught.value
    streamed = caller.ask(text, images, **more)
    for message in (str(caught.value), str(streamed.error)):
        for word in words:
            assert word in message


def test_a5_a_bad_image_among_good_ones_is_named(caller: Any, png: Any) -> None:
    good = png(56, 56)
    refused(caller, QUESTION, [good, good, b"not a picture", good], "image 2")
    refused(caller, QUESTION, [good, good[: len(good) // 2]], "image 1")
    refused(caller, QUESTION, [b""], "image 0")


def test_a5_neighbours_in_flight_get_their_answers(caller: Any, png: Any) -> None:
    image = png(56, 56)
    expected = caller.unary(QUESTION, [image], **GREEDY)["text_output"]

    def ask(number: int) -> bytes | str:
        try:
            data = image if number % 3 else image[:40]
            text: bytes = caller.unary(QUESTION, [data], **GREEDY)["text_output"]
            return text
        except InferenceServerException as exc:
            return str(exc.status())

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(36)))
    assert [answer == expected for answer in answers] == [bool(number % 3) for number in range(36)]
    assert {answer for answer in answers if answer != expected} == {"StatusCode.INVALID_ARGUMENT"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -1),
        ("top_p", 0),
        ("seed", -1),
        ("no_such_option", 1),
        ("max_tokens", "many"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: Any, caller: Any) -> None:
    refused(caller, QUESTION, None, option, **{option: value})


def test_c6_more_images_than_the_limit_are_refused_before_decoding(caller: Any) -> None:
    refused(caller, QUESTION, [b"never decoded"] * 65, "65", "64")


def test_image_parts_and_images_must_be_equally_many(caller: Any, png: Any) -> None:
    messages = [{"role": "user", "content": [PART, PART, {"type": "text", "text": QUESTION}]}]
    refused(caller, None, [png(56, 56)], "2", "1", messages=messages)


def test_neither_text_nor_messages_is_refused(caller: Any, png: Any) -> None:
    refused(caller, None, [png(56, 56)], "text_input", "messages")


def test_g2_deeply_nested_messages_are_refused(caller: Any) -> None:
    answer = caller.generate(messages=DEEP)
    assert "error" in answer
    assert len(answer["error"]) < 500


def test_h6_a_prompt_longer_than_the_context_names_both_numbers(caller: Any, png: Any) -> None:
    refused(caller, QUESTION, [png(2000, 2000)] * 4, "16960 tokens", "16383")


def test_kimi_vision_without_an_image_is_refused(caller: Any) -> None:
    with pytest.raises(InferenceServerException, match="image"):
        caller.embed([])


def test_a6_a_decompression_bomb_is_refused_from_its_header(caller: Any, huge_png: bytes) -> None:
    refused(caller, QUESTION, [huge_png], "image 0", "20000")


def test_http_reports_the_error_in_its_body(caller: Any) -> None:
    answer = caller.generate(QUESTION, image=["AAAA"])
    assert "image 0" in answer["error"]
    status, body = caller.post("/v2/models/kimi_vl_unary/infer", {"inputs": []})
    assert status == 400
    assert "text_input" in json.dumps(body)


@pytest.mark.parametrize("model", ["moonvit", "llm"])
def test_tensors_that_do_not_fit_are_refused_by_the_step_itself(model: str, caller: Any) -> None:
    """A caller may reach the steps directly; counts are checked there again, naming both sides."""
    digest = {"name": "image_digest", "shape": [1, 0, 32], "datatype": "UINT8", "data": []}
    grid = {"name": "image_grid_thw", "shape": [1, 1, 3], "datatype": "INT64", "data": [1, 4, 4]}
    if model == "moonvit":
        pixels = {"name": "pixel_values", "shape": [1, 1, 3, 14, 14], "datatype": "UINT8", "data": [0] * 588}
        status, body = caller.post("/v2/models/moonvit/infer", {"inputs": [pixels, grid, digest]})
        assert status == 400
        assert "image_digest" in body["error"] or "16" in body["error"]
    else:
        status, body = caller.post("/v2/models/llm/generate", {"input_ids": [1, 2], "generation": "{}"})
        assert "error" in body
