# SPDX-License-Identifier: Apache-2.0
"""What the command writes: answers to stdout, everything else to stderr, colour and bars only for people."""

from __future__ import annotations

import sys
import time

BAR_WIDTH = 30


def write(text: str) -> None:
    """Write a piece of the answer to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line about the answer to stderr, if a person is watching."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m\n")
        sys.stderr.flush()


def tell(text: str) -> None:
    """Write a line about what is going on to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def aside(text: str) -> None:
    """Write a piece of something that is not the answer, such as reasoning, to stderr, if a person is watching."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m")
        sys.stderr.flush()


def complain(text: str) -> None:
    """Write an error in one line to stderr."""
    sys.stderr.write(f"kimi-client: {' '.join(text.split())}\n")


class Progress:
    """A bar on stderr while a person is watching, and one line at the end in any case."""

    def __init__(self, total: int, unit: str) -> None:
        self._total = total
        self._unit = unit
        self._started = time.monotonic()

    def show(self, done: int) -> None:
        """Draw the bar at `done` of the total."""
        if sys.stderr.isatty():
            filled = BAR_WIDTH * done // max(1, self._total)
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {self._state(done)}")
            sys.stderr.flush()

    def finish(self, done: int) -> None:
        """Replace the bar by the last state."""
        sys.stderr.write(f"{chr(13) if sys.stderr.isatty() else ''}{self._state(done)}\n")

    def _state(self, done: int) -> str:
        seconds = time.monotonic() - self._started
        return f"{done}/{self._total} {self._unit}, {done / max(seconds, 1e-9):.1f} {self._unit}/s, {seconds:.0f} s"
