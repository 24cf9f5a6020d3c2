# SPDX-License-Identifier: Apache-2.0
"""Chat messages in OpenAI form, from the JSON a caller wrote to checked values.

Keys that are null, and empty lists, count as absent, so that messages dumped by an OpenAI client pass. Any other key
that we do not use is refused by name: an option that is silently dropped looks like a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from kimi_triton.errors import InvalidRequest
from kimi_triton.text.request_json import parse_json

MAX_MESSAGES_BYTES = 64 << 20  # inline images are part of it
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # per message

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
_KEYS: dict[Role, tuple[str, ...]] = {
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image at this place: the one at `url`, or the next element of the `image` input."""

    url: str | None = None


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A video at this place: one media item per chunk, with the timestamp of its first frame as HH:MM:SS.mmm."""

    timestamps: tuple[str, ...]


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    arguments: str  # JSON as the model wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    parts: tuple[Part, ...] = ()
    name: str | None = None
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


def user_message(text: str, num_images: int) -> Message:
    """One turn: the images first, then the text."""
    return Message(role="user", parts=(*[ImagePart()] * num_images, TextPart(text)))


def image_parts(messages: Sequence[Message]) -> list[ImagePart]:
    """All images in the order of the prompt."""
    return [part for message in messages for part in message.parts if isinstance(part, ImagePart)]


def parse_messages(raw: bytes) -> list[Message]:
    """Messages of a JSON list. Raises InvalidRequest, naming the message (from 0) and the field."""
    value = parse_json(raw, "messages", MAX_MESSAGES_BYTES)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a JSON list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(value)} messages, the limit is {MAX_MESSAGES}")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    stated = _object(value, where)
    role = stated.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}, got {_shown(role)}")
    role = cast(Role, role)
    _refuse_unknown(stated, _KEYS[role], f"{where} with role {role}")
    if "content" not in stated and "tool_calls" not in stated:
        raise InvalidRequest(f"{where}.content is missing or empty")
    return Message(
        role=role,
        parts=_parts(stated.get("content", []), f"{where}.content"),
        name=_string(stated, "name", where, "") or None,
        reasoning_content=_string(stated, "reasoning_content", where, ""),
        tool_calls=_tool_calls(stated.get("tool_calls", []), f"{where}.tool_calls"),
        tool_call_id=_string(stated, "tool_call_id", where, None if role == "tool" else ""),
    )


def _parts(content: Any, where: str) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts, got {_shown(content)}")
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{where} has {len(content)} parts, the limit is {MAX_PARTS}")
    return tuple(_part(item, f"{where}[{index}]") for index, item in enumerate(content))


def _part(value: Any, where: str) -> Part:
    stated = _object(value, where)
    kind = stated.get("type")
    if kind == "text":
        _refuse_unknown(stated, ("type", "text"), where)
        return TextPart(_string(stated, "text", where))
    if kind == "image":
        _refuse_unknown(stated, ("type",), f"{where} (its picture is the next element of the image input)")
        return ImagePart()
    if kind == "image_url":
        _refuse_unknown(stated, ("type", "image_url"), where)
        return ImagePart(_image_url(stated.get("image_url"), f"{where}.image_url"))
    raise InvalidRequest(f"{where}.type must be text, image or image_url, got {_shown(kind)}")


def _image_url(value: Any, where: str) -> str:
    """Whether an address is fetched is decided later. `detail` has no effect: the checkpoint decides on the size."""
    stated = _object(value, where)
    _refuse_unknown(stated, ("url", "detail"), where)
    url = _string(stated, "url", where)
    if url[:8].partition(":")[0].lower() not in ("data", "http", "https"):
        raise InvalidRequest(f"{where}.url must be a data: URL or an address, it starts with {url[:8]!r}")
    return url


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list, got {_shown(value)}")
    return tuple(_tool_call(item, f"{where}[{index}]") for index, item in enumerate(value))


def _tool_call(value: Any, where: str) -> ToolCall:
    stated = _object(value, where)
    _refuse_unknown(stated, ("id", "type", "function", "index"), where)
    function = _object(stated.get("function"), f"{where}.function")
    _refuse_unknown(function, ("name", "arguments"), f"{where}.function")
    # Kimi's ids contain the function's name (functions.NAME:INDEX), its prompt has no other place for it.
    return ToolCall(id=_string(stated, "id", where), arguments=_string(function, "arguments", f"{where}.function"))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be a JSON object, got {_shown(value)}")
    return {key: item for key, item in value.items() if item is not None and item != []}


def _refuse_unknown(stated: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in stated:
        if key not in known:
            raise InvalidRequest(f"{where} has unknown key {key[:80]!r}; known are {', '.join(known)}")


def _string(stated: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = stated.get(key, default)
    if value is None:
        raise InvalidRequest(f"{where}.{key} is missing")
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{key} must be a string, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A short, safe way to quote a value: never the bytes of a picture."""
    if isinstance(value, dict | list):
        return f"a JSON {type(value).__name__}"
    return repr(value)[:40]
