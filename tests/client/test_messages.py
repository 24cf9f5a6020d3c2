# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest

from kimi_client import InvalidRequest, user_message
from kimi_client.messages import wire_messages

TEXT = {"type": "text", "text": "hi"}
HOLE = {"type": "image"}


def wired(messages: list[Any], images: list[bytes]) -> tuple[Any, list[Any]]:
    packed, ordered = wire_messages(messages, images)  # type: ignore[arg-type]
    return json.loads(packed), ordered


def test_plain_text_passes_unchanged() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Was ist das? 猫"}]
    assert wired(messages, []) == (messages, [])


def test_holes_take_the_images_in_order() -> None:
    messages = [{"role": "user", "content": [HOLE, TEXT, HOLE]}]
    assert wired(messages, [b"a", b"b"]) == (messages, [b"a", b"b"])


def test_c7_pictures_keep_their_places_however_they_are_given() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    messages = [
        {"role": "user", "content": [{"type": "image", "image": b"first"}, HOLE]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [url, HOLE, {"type": "image_url", "image_url": "data:,x"}]},
    ]
    wire, ordered = wired(messages, [b"second", b"fourth"])
    assert ordered == [b"first", b"second", "data:image/png;base64,AA", b"fourth", "data:,x"]
    assert [part for message in wire if message["role"] == "user" for part in message["content"]] == [HOLE] * 5


def test_the_callers_messages_are_not_changed() -> None:
    messages = [user_message("hi", [b"a"])]
    wire_messages(messages)
    assert messages == [user_message("hi", [b"a"])]


@pytest.mark.parametrize(
    ("holes", "images", "reason"),
    [(1, 0, "no image .number 0"), (2, 1, "no image .number 1"), (0, 1, "1 images .* 1 image parts fewer")],
)
def test_c6_counts_that_differ_are_refused(holes: int, images: int, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        wire_messages([{"role": "user", "content": [HOLE] * holes}], [b"x"] * images)


def test_other_keys_and_parts_reach_the_server() -> None:
    messages = [{"role": "tool", "tool_call_id": "1", "content": [{"type": "video"}, "odd"]}, {"role": "user"}]
    wire, _ = wired(messages, [])
    assert wire[0] == messages[0]
    assert wire[1] == {"role": "user", "content": None}


def test_a_user_message_without_pictures_is_plain() -> None:
    assert user_message("hi") == {"role": "user", "content": "hi"}


def test_messages_that_are_no_json_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="plain JSON"):
        wire_messages([{"role": "user", "content": b"bytes"}])
