# SPDX-License-Identifier: Apache-2.0
"""Conversations in OpenAI's form, taken apart into the `messages` and `image` inputs.

The server's form of a picture inside a message is the part `{"type": "image"}`, which stands for the next element of
`image`. Callers may write the picture into the part instead, as `{"type": "image", "image": PICTURE}` or as OpenAI's
`{"type": "image_url", "image_url": {"url": "data:..."}}`; it is then lifted out here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kimi_client.errors import InvalidRequest
from kimi_client.images import ImageLike

Message: TypeAlias = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": str or list of parts}"""


def wire_messages(messages: Sequence[Message], images: Sequence[ImageLike] = ()) -> tuple[bytes, list[ImageLike]]:
    """Return the `messages` JSON and the pictures in the order in which its image parts stand for them.

    `images` are dealt to the parts that carry no picture of their own. Raises InvalidRequest where the numbers differ.
    """
    waiting = list(images)
    ordered: list[ImageLike] = []
    wire = [{**message, "content": _wire_content(message.get("content"), waiting, ordered)} for message in messages]
    if waiting:
        raise InvalidRequest(f"{len(images)} images were given, but the messages have {len(waiting)} image parts fewer")
    try:
        return json.dumps(wire, ensure_ascii=False).encode(), ordered
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"messages must be plain JSON apart from their pictures: {error}") from error


def user_message(text: str, images: Sequence[ImageLike] = ()) -> Message:
    """Return a user's message that shows some pictures and then says `text`."""
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}


def _wire_content(content: Any, waiting: list[ImageLike], ordered: list[ImageLike]) -> Any:
    if not isinstance(content, (list, tuple)):
        return content
    return [_wire_part(part, waiting, ordered) for part in content]


def _wire_part(part: Any, waiting: list[ImageLike], ordered: list[ImageLike]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
        return part
    picture = _own_picture(part)
    if picture is None:
        if not waiting:
            raise InvalidRequest(f"the messages have an image part for which there is no image (number {len(ordered)})")
        picture = waiting.pop(0)
    ordered.append(picture)
    return {"type": "image"}


def _own_picture(part: Mapping[str, Any]) -> ImageLike | None:
    if part["type"] == "image":
        return part.get("image")
    url = part.get("image_url")
    picture: ImageLike | None = url.get("url") if isinstance(url, Mapping) else url
    return picture
