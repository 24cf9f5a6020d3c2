# SPDX-License-Identifier: Apache-2.0
"""Cut a streamed text before the first stop string, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text that could be the beginning of a stop string is held back until it is clear."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False
        self.rest = ""  # what came behind the stop string

    def push(self, piece: str) -> str:
        """What may be shown now. `found` turns true once a stop string was seen; nothing is shown after it."""
        if self.found:
            return ""
        text = self._held + piece
        # The one that is complete first counts, so that the result does not depend on the pieces.
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self.found, self._held, self.rest = True, "", text[end:]
            return text[:start]
        keep = self._num_held(text)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown

    def finish(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
