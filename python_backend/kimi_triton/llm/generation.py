# SPDX-License-Identifier: Apache-2.0
"""One generation between an engine and a caller: collects tokens, makes text of them, responds."""

from __future__ import annotations

import threading

from kimi_triton.errors import KimiError
from kimi_triton.llm.answer import Answer, Caller
from kimi_triton.llm.answer_text import AnswerText
from kimi_triton.llm.engine import FinishReason, Token


class Generation:
    """The TokenSink of one request.

    A streamed answer goes out whenever there is text to show; tokens that come together go together. The last piece
    carries the final flag itself. Any other answer is one response.
    """

    def __init__(
        self, caller: Caller, text: AnswerText, *, stream: bool, logprobs: bool, prompt_tokens: int, cached_images: int
    ) -> None:
        self._caller = caller
        self._calling = threading.Lock()
        self._text = text
        self._stream = stream
        self._logprobs: list[float] | None = [] if logprobs else None
        self._prompt_tokens = prompt_tokens
        self._cached_images = cached_images
        self._completion_tokens = 0
        self._pieces: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self.is_final = False

    def is_cancelled(self) -> bool:
        """Ask the caller, unless it has its final response already."""
        with self._calling:
            return not self.is_final and self._caller.is_cancelled()

    def on_token(self, token: Token, more: bool = False) -> bool:
        self._completion_tokens += 1
        self._token_ids.append(token.token_id)
        if self._logprobs is not None and token.logprob is not None:
            self._logprobs.append(token.logprob)
        self._collect(*self._text.push(token.token_id))
        if self._text.stopped:
            self.on_end("stop")
            return False
        if token.finish_reason is not None:
            self.on_end(token.finish_reason)
        elif self._stream and not more and (any(self._pieces) or any(self._reasoning)):
            self._respond(None)
        return True

    def on_end(self, reason: FinishReason) -> None:
        self._collect(*self._text.finish())
        # What was held back can complete a stop string.
        self._respond("stop" if self._text.stopped else reason)

    def on_error(self, error: KimiError) -> None:
        """Nothing is sent when the final response was tried already: a second one would break the protocol."""
        with self._calling:
            if self.is_final:
                return
            self.is_final = True
            self._caller.respond_error(error)

    def _collect(self, text: str, reasoning: str) -> None:
        self._pieces.append(text)
        self._reasoning.append(reasoning)

    def _respond(self, reason: FinishReason | None) -> None:
        answer = Answer(
            text="".join(self._pieces),
            reasoning="".join(self._reasoning),
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_images=self._cached_images,
            token_ids=tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )
        for collected in (self._pieces, self._reasoning, self._token_ids, self._logprobs or []):
            collected.clear()
        with self._calling:
            self.is_final = reason is not None
            self._caller.respond(answer, self.is_final)
