# SPDX-License-Identifier: Apache-2.0
"""What the step asks of an engine, whichever it is: prompts in, token ids out, one by one.

Text, stop strings, reasoning and usage are made from the ids elsewhere, so that all engines answer alike.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kimi_triton.errors import KimiError
from kimi_triton.text.options import GenerationOptions

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """One prompt. Placeholders are expanded and counted already; both tensors are on the CPU."""

    request_id: str
    input_ids: Tensor  # (num_tokens,) int64
    image_embeds: Tensor  # (num_image_tokens, text_hidden_size), zero rows without images
    options: GenerationOptions
    max_tokens: int  # at least 1, cut to what the context leaves free
    deadline: float | None = None  # time.monotonic()


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. The last one says why it is the last; a stop token is delivered like any other."""

    token_id: int
    logprob: float | None = None
    finish_reason: FinishReason | None = None


class TokenSink(Protocol):
    """Where an engine puts a request's tokens, called from the engine's thread and never twice at once.

    A request ends with exactly one of: a token with a finish_reason, `on_token` returning False, `on_end`, or
    `on_error`, which an exception out of `on_token` leads to as well.
    """

    def on_token(self, token: Token, more: bool = False) -> bool:
        """Take a token; False when the caller needs no more. `more`: the next one is here already and follows."""

    def on_end(self, reason: FinishReason) -> None:
        """The request ended between two tokens."""

    def on_error(self, error: KimiError) -> None:
        """The request failed."""


class Engine(Protocol):
    """A language model that serves many requests at once."""

    context_length: int  # tokens of prompt and answer together

    def start(self) -> None:
        """Begin to serve; returns when requests can be submitted."""

    def submit(self, request: TokenRequest, sink: TokenSink) -> None:
        """Take a request in. Raises InvalidRequest or Unavailable, and then never calls the sink."""

    def cancel(self, request_id: str) -> bool:
        """Ask for a live request to end with reason "cancelled"; False when there is none of this id."""

    def stop(self) -> None:
        """End all live requests with Unavailable and return when nothing runs any more."""

    def is_healthy(self) -> bool:
        """Whether a request submitted now could be answered."""


def as_kimi_error(exc: Exception) -> KimiError:
    """What a caller may see: an exception nobody foresaw goes to the log in full, and to the caller by its type."""
    if isinstance(exc, KimiError):
        return exc
    logger.error("an unexpected error ends a request", exc_info=exc)
    return KimiError(f"{type(exc).__name__}; the server's log has the details")
