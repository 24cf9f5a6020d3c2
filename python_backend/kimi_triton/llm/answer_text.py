# SPDX-License-Identifier: Apache-2.0
"""The text side of one answer: token ids in, what the caller may see out."""

from __future__ import annotations

from kimi_triton.llm.detokenizer import Detokenizer
from kimi_triton.llm.reasoning import MarkedReasoning, Parts
from kimi_triton.llm.stop_strings import StopStrings
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.text.tokenizer import KimiTokenizer


class AnswerText:
    """Detokenises, separates reasoning from the answer and cuts the answer before a stop string.

    Kimi-K2.5 thinks between `<think>` and `</think>`; its prompt usually opens the thought, which `in_reasoning` says.
    Kimi-VL-Thinking writes markers in plain text. Stop strings end the answer, not a thought.
    """

    def __init__(self, tokenizer: KimiTokenizer, roles: TokenRoles, stops: tuple[str, ...], in_reasoning: bool) -> None:
        self._tokenizer = tokenizer
        self._roles = roles
        self._detokenizer = Detokenizer(tokenizer.decode_bytes)
        self._marked = MarkedReasoning() if roles.think_end is None else None
        self._in_reasoning = in_reasoning
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.found

    def push(self, token_id: int) -> Parts:
        if token_id in (self._roles.think_start, self._roles.think_end):
            parts = self._sort(self._detokenizer.finish())
            self._in_reasoning = token_id == self._roles.think_start
            return parts
        if self._tokenizer.is_special(token_id) and token_id not in self._roles.shown:
            return Parts("", "")
        return self._sort(self._detokenizer.push(token_id))

    def finish(self) -> Parts:
        """What was held back, when no more tokens come."""
        text, reasoning = self._sort(self._detokenizer.finish())
        if self._marked is not None:
            last = self._marked.finish()
            text, reasoning = text + self._stops.push(last.text), reasoning + last.reasoning
        return Parts(text + self._stops.finish(), reasoning)

    def _sort(self, piece: str) -> Parts:
        if self._marked is not None:
            text, reasoning = self._marked.push(piece)
            return Parts(self._stops.push(text), reasoning)
        if self._in_reasoning:
            return Parts("", piece)
        return Parts(self._stops.push(piece), "")
