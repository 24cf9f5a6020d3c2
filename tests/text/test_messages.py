# SPDX-License-Identifier: Apache-2.0
"""Messages as OpenAI clients write them, and what is refused with the place named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kimi_triton.errors import InvalidRequest
from kimi_triton.text.messages import (
    MAX_MESSAGES,
    MAX_MESSAGES_BYTES,
    MAX_PARTS,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    image_parts,
    parse_messages,
    user_message,
)

PNG_URL = "data:image/png;base64,iVBORw0KGgo="


def parse(*messages: Any) -> list[Message]:
    return parse_messages(json.dumps(messages).encode())


def parse_user(*parts: Any) -> list[Message]:
    return parse({"role": "user", "content": list(parts)})


def refusal(*messages: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse(*messages)
    return str(caught.value)


def test_string_content_is_one_text_part() -> None:
    assert parse({"role": "system", "content": "be brief"}, {"role": "user", "content": ""}) == [
        Message(role="system", parts=(TextPart("be brief"),)),
        Message(role="user", parts=(TextPart(""),)),
    ]


def test_parts_keep_their_order() -> None:
    (message,) = parse_user(
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": PNG_URL, "detail": "high"}},
        {"type": "text", "text": "b"},
    )
    assert message.parts == (TextPart("a"), ImagePart(), ImagePart(PNG_URL), TextPart("b"))


def test_images_are_listed_across_messages() -> None:
    messages = parse(
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG_URL}}]},
    )
    assert image_parts(messages) == [ImagePart(), ImagePart(PNG_URL)]


def test_an_answer_dumped_by_an_openai_client_passes() -> None:
    """Such a dump carries every field of the answer, most of them null."""
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "I should look it up",
        "tool_calls": [
            {"id": "functions.get:0", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "functions.get:0", "name": "get", "content": "42"}
    assert parse(answer, result) == [
        Message(
            role="assistant",
            reasoning_content="I should look it up",
            tool_calls=(ToolCall("functions.get:0", '{"a": 1}'),),
        ),
        Message(role="tool", parts=(TextPart("42"),), name="get", tool_call_id="functions.get:0"),
    ]


def test_user_message_has_its_images_first() -> None:
    assert user_message("hi", 2).parts == (ImagePart(), ImagePart(), TextPart("hi"))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("hi", "messages[1] must be a JSON object, got 'hi'"),
        ({"content": "x"}, "messages[1].role must be one of system, user, assistant, tool, got None"),
        ({"role": "developer", "content": "x"}, "got 'developer'"),
        ({"role": ["user"], "content": "x"}, "got a JSON list"),
        ({"role": "user"}, "messages[1].content is missing"),
        ({"role": "user", "content": None}, "messages[1].content is missing"),
        ({"role": "user", "content": []}, "messages[1].content is missing or empty"),
        ({"role": "assistant", "content": None}, "messages[1].content is missing"),
        ({"role": "user", "content": 7}, "messages[1].content must be a string or a list of parts, got 7"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content must be a string or a list of parts"),
        ({"role": "user", "content": "x", "name": 3}, "messages[1].name must be a string, got 3"),
        ({"role": "user", "content": "x", "cache": 3}, "messages[1] with role user has unknown key 'cache'"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "unknown key 'tool_calls'"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id is missing"),
        ({"role": "assistant", "tool_calls": {"id": 1}}, "messages[1].tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [7]}, "messages[1].tool_calls[0] must be a JSON object"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0].function must be"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"a": 1}}}]},
            "messages[1].tool_calls[0].function.arguments must be a string, got a JSON dict",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "1"}}]}, "tool_calls[0].id is missing"),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(message: Any, expected: str) -> None:
    assert expected in refusal({"role": "user", "content": "fine"}, message)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("text", "messages[0].content[1] must be a JSON object"),
        ({"text": "x"}, "messages[0].content[1].type must be text, image or image_url, got None"),
        ({"type": "input_audio"}, "got 'input_audio'"),
        ({"type": "text"}, "messages[0].content[1].text is missing"),
        ({"type": "text", "text": 1}, "messages[0].content[1].text must be a string, got 1"),
        ({"type": "image", "image": "x.png"}, "next element of the image input) has unknown key 'image'"),
        ({"type": "image_url", "image_url": PNG_URL}, "messages[0].content[1].image_url must be a JSON object"),
        ({"type": "image_url", "image_url": {}}, "image_url.url is missing"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data: URL or an address"),
        ({"type": "image_url", "image_url": {"url": "iVBORw0KGgo="}}, "must be a data: URL or an address"),
        ({"type": "image_url", "image_url": {"url": PNG_URL, "size": 1}}, "unknown key 'size'"),
    ],
)
def test_a_wrong_part_is_refused_with_its_place(part: Any, expected: str) -> None:
    assert expected in refusal({"role": "user", "content": [{"type": "text", "text": "fine"}, part]})


@pytest.mark.parametrize("url", ["http://a/b.png", "https://a/b.png", "HTTPS://a/b.png"])
def test_addresses_are_left_to_the_image_steps(url: str) -> None:
    (message,) = parse({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
    assert message.parts == (ImagePart(url),)


@pytest.mark.parametrize("raw", [b"[]", b"{}", b"null", b'"hi"', b"", b"{", b'[{"role": "user"'])
def test_what_is_no_list_of_messages_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages "):
        parse_messages(raw)


def test_bytes_that_are_no_utf8_are_refused_with_their_place() -> None:
    with pytest.raises(InvalidRequest, match="messages is no UTF-8: byte 1 is 0xff"):
        parse_messages(b'"\xff"')


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'[{"role": "user", "content": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}]",
    ],
)
def test_g2_json_nested_10000_deep_is_a_clean_refusal(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="nests JSON too deep"):
        parse_messages(raw)
    assert parse({"role": "user", "content": "next"})


def test_g2_sizes_are_limited_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match=rf"{MAX_MESSAGES_BYTES + 1} bytes, the limit is {MAX_MESSAGES_BYTES}"):
        parse_messages(bytes(MAX_MESSAGES_BYTES + 1))
    message = {"role": "user", "content": "x"}
    assert f"{MAX_MESSAGES + 1} messages, the limit is {MAX_MESSAGES}" in refusal(*[message] * (MAX_MESSAGES + 1))
    parts = [{"type": "text", "text": ""}] * (MAX_PARTS + 1)
    assert f"{MAX_PARTS + 1} parts, the limit is {MAX_PARTS}" in refusal({"role": "user", "content": parts})


def test_a6_refusals_never_repeat_a_payload() -> None:
    payload = "A" * 100_000
    for url in (payload, "ftp:" + payload):
        assert len(refusal({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})) < 200
    assert len(refusal({"role": "user", "content": [{"type": "image_url", "image_url": payload}]})) < 200
    assert len(refusal({"role": "user", "content": [{"type": payload}]})) < 200
    assert len(refusal({"role": "user", "content": "x", payload: 1})) < 300
