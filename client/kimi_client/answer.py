# SPDX-License-Identifier: Apache-2.0
"""Answers as plain values, read from the tensors of one or many responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_client.errors import ServerError
from kimi_client.tensors import Outputs


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost: tokens read (image tokens included), tokens written, images found in the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_images: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a streamed answer: what is new since the piece before.

    Only the last has a finish reason and the usage. `logprobs` is empty unless the option asked for it.
    """

    text: str
    reasoning: str
    logprobs: tuple[float, ...]
    finish_reason: str | None
    usage: Usage | None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    `reasoning` is what a thinking model wrote before its answer; `logprobs` has the log-probability of every token of
    both, if the option asked for it; `finish_reason` is "stop", "length" or "cancelled".
    """

    text: str
    reasoning: str
    logprobs: tuple[float, ...]
    finish_reason: str
    usage: Usage
    request_id: str

    def __str__(self) -> str:
        return self.text


def read_chunk(outputs: Outputs) -> Chunk:
    """Read one response of `kimi_vl`: BYTES [1] and INT32 [1] tensors."""
    try:
        text, reasoning, logprobs, reason = (
            outputs[name].item().decode() for name in ("text_output", "reasoning_output", "logprobs", "finish_reason")
        )
        counts = [int(outputs[name].item()) for name in ("prompt_tokens", "completion_tokens", "cached_images")]
        return Chunk(text, reasoning, tuple(json.loads(logprobs)), reason or None, Usage(*counts) if reason else None)
    except (KeyError, ValueError, AttributeError) as error:
        raise ServerError(f"the response is not one of kimi_vl: it has {sorted(outputs)} ({error!r})") from error


def join_chunks(chunks: Sequence[Chunk], request_id: str) -> Answer:
    """Join the pieces of a stream, or the only one of a unary answer; raises ServerError where the end is missing."""
    last = chunks[-1] if chunks else None
    if last is None or last.finish_reason is None or last.usage is None:
        raise ServerError(f"the answer to {request_id} ended after {len(chunks)} pieces without a finish reason")
    text = "".join(chunk.text for chunk in chunks)
    reasoning = "".join(chunk.reasoning for chunk in chunks)
    logprobs = tuple(value for chunk in chunks for value in chunk.logprobs)
    return Answer(text, reasoning, logprobs, last.finish_reason, last.usage, request_id)


def split_embeds(outputs: Outputs) -> list[NDArray[np.float32]]:
    """Deal the rows of `image_embeds` to the images.

    `image_embeds` (1, num_image_tokens, hidden), `image_grid_thw` (1, num_images, 3) -> per image (its tokens, hidden).
    An image has a row per merge window of its h x w grid; the window's size follows from the totals.
    """
    embeds = outputs["image_embeds"][0]  # (num_image_tokens, hidden)
    patches = outputs["image_grid_thw"][0][:, 1:].prod(axis=1)  # (num_images,) patches of one frame
    window = int(patches.sum()) // max(1, len(embeds))
    if window < 1 or (patches % window).any() or int(patches.sum()) != window * len(embeds):
        raise ServerError(f"image_embeds has {len(embeds)} rows, image_grid_thw describes {patches.tolist()} patches")
    return np.split(embeds, np.cumsum(patches // window)[:-1])
