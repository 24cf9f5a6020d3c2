# SPDX-License-Identifier: Apache-2.0
"""Tell the thoughts of Kimi-VL-Thinking from its answer; they are marked in plain text, not by control tokens."""

from __future__ import annotations

from typing import NamedTuple

from kimi_triton.llm.stop_strings import StopStrings

OPENING, CLOSING = "◁think▷", "◁/think▷"


class Parts(NamedTuple):
    text: str
    reasoning: str


class MarkedReasoning:
    """Only a text that begins with the opening marker has reasoning; later markers are ordinary text."""

    def __init__(self) -> None:
        self._start: str | None = ""  # the text so far, as long as it could be the opening marker
        self._closing: StopStrings | None = None  # set while inside the reasoning

    def push(self, piece: str) -> Parts:
        if self._start is not None:
            piece = self._open(self._start + piece)
        if self._closing is None:
            return Parts(piece, "")
        reasoning = self._closing.push(piece)
        if not self._closing.found:
            return Parts("", reasoning)
        text, self._closing = self._closing.rest, None
        return Parts(text, reasoning)

    def finish(self) -> Parts:
        if self._closing is not None:
            return Parts("", self._closing.finish())
        held, self._start = self._start or "", None
        return Parts(held, "")

    def _open(self, text: str) -> str:
        """What of `text` is past the question whether it opens the reasoning."""
        begun = text.lstrip()
        if begun.startswith(OPENING):
            self._start, self._closing = None, StopStrings([CLOSING])
            return begun.removeprefix(OPENING)
        if OPENING.startswith(begun):
            self._start = text
            return ""
        self._start = None
        return text
