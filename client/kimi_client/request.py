# SPDX-License-Identifier: Apache-2.0
"""A call as the tensors that are sent, before any protocol is involved.

Every input of the public models is a BYTES tensor of one dimension, so a request is names and lists of bytes. All
options travel in `sampling_parameters`, one JSON object, which is the one way that gRPC, HTTP infer and HTTP
generate have in common.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from kimi_client.errors import InvalidRequest
from kimi_client.images import ImageLike, image_elements
from kimi_client.messages import Message, wire_messages

CHAT_MODEL = "kimi_vl"  # decoupled: many responses
UNARY_CHAT_MODEL = "kimi_vl_unary"  # the same answers in one response
VISION_MODEL = "kimi_vision"
CANCEL_MODEL = "kimi_cancel"
PUBLIC_MODELS = (CHAT_MODEL, UNARY_CHAT_MODEL, VISION_MODEL)


class Options(TypedDict, total=False):
    """Generation options; the server checks them and fills in the checkpoint's defaults."""

    max_tokens: int  # longest answer, in tokens
    temperature: float  # 0 takes the likeliest token each time
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int
    stop: str | list[str]  # texts that end the answer; they are not part of it
    thinking: bool  # False skips the reasoning of a thinking model
    logprobs: bool  # report the log-probability of every token


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """One request: which model, its BYTES inputs by name, and an id that no other live request has."""

    model: str
    inputs: Mapping[str, Sequence[bytes]]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


def chat_request(
    prompt: str | Sequence[Message],
    images: Sequence[ImageLike],
    options: Mapping[str, Any],
    *,
    stream: bool,
    request_id: str | None = None,
) -> InferRequest:
    """Return the request for a question (str) or a conversation (messages) about some pictures."""
    inputs: dict[str, Sequence[bytes]]
    if isinstance(prompt, str):
        inputs, pictures = {"text_input": [prompt.encode()]}, list(images)
    else:
        conversation, pictures = wire_messages(prompt, images)
        inputs = {"messages": [conversation]}
    if pictures:
        inputs["image"] = image_elements(pictures)
    inputs["sampling_parameters"] = [_options_json({**options, "stream": stream})]
    return InferRequest(model=CHAT_MODEL, inputs=inputs, request_id=_checked_id(request_id))


def vision_request(images: Sequence[ImageLike], *, request_id: str | None = None) -> InferRequest:
    """Return the request for the embeddings of some pictures, at least one."""
    elements = image_elements(images)
    if not elements:
        raise InvalidRequest("embed needs at least one image, got none")
    return InferRequest(model=VISION_MODEL, inputs={"image": elements}, request_id=_checked_id(request_id))


def cancel_request(request_id: str) -> InferRequest:
    """Return the request that tells the server to stop work on another request."""
    return InferRequest(model=CANCEL_MODEL, inputs={"request_id": [request_id.encode()]})


def _options_json(options: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(options, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"options must be plain numbers, strings, booleans and lists of strings: {error}"
        ) from error


def _checked_id(request_id: str | None) -> str:
    if request_id == "":
        raise InvalidRequest("request_id must not be empty; leave it out to get a fresh one")
    return uuid.uuid4().hex if request_id is None else request_id
