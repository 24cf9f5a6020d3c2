# SPDX-License-Identifier: Apache-2.0
"""What a caller gets: pieces of an answer while it is streamed, or all of it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kimi_triton.errors import KimiError
from kimi_triton.llm.engine import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response. `text`, `reasoning`, `token_ids` and `logprobs` are what came since the response before.

    completion_tokens counts every sampled token so far: reasoning and the token that ends the answer are in it.
    """

    text: str
    reasoning: str
    finish_reason: FinishReason | None  # set on the final response alone
    prompt_tokens: int
    completion_tokens: int
    cached_images: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None  # of token_ids, when asked for


class Caller(Protocol):
    """Whoever waits for an answer. Calls come from threads of the step, never two at once.

    There is exactly one final call: `respond` with `final`, or `respond_error`.
    """

    def respond(self, answer: Answer, final: bool) -> None: ...

    def respond_error(self, error: KimiError) -> None: ...

    def is_cancelled(self) -> bool:
        """Whether the caller is known to have gone away; asked every few milliseconds."""
