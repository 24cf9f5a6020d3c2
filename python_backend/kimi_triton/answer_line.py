# SPDX-License-Identifier: Apache-2.0
"""How many requests are between the first step and the end of their answer, over all processes of a server.

The language model answers a certain number of requests at once and lets a certain number wait. What is beyond these is
refused by the first step, before a picture is decoded for it. What is lost between the two, because a process died, is
struck out after LEASE_S; what the language model has taken stays until its answer ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kimi_triton.errors import Unavailable
from kimi_triton.shared_path import shared_path
from kimi_triton.shared_table import SharedTable

LEASE_S = 30.0
ROWS = 8192
ROW = np.dtype([("key", np.float64), ("until", np.float64)])  # until 0: a free row


class AnswerLine(SharedTable):
    """A request is known by the time at which the first step began with it, `received_s`.

    Without one it takes no part: it wants rows alone, or asks the language model directly. A language model that
    starts again clears it.
    """

    def __init__(self, file: Path, max_requests: int) -> None:
        super().__init__(file, ROW, ROWS)
        self._max_requests = min(max_requests, ROWS)

    @classmethod
    def of_repository(cls, repository: Path, max_requests: int) -> AnswerLine:
        """The line of the servers of one model repository."""
        return cls(shared_path("answers", repository), max_requests)

    def refuse_when_full(self) -> None:
        """Raise Unavailable when nobody would be let in."""
        self._refuse(len(self))

    @contextmanager
    def entered(self, received_s: float | None) -> Iterator[None]:
        """Let a request in, or raise Unavailable; it leaves again when an error ends the block."""
        if received_s is not None:
            self._enter(received_s)
        try:
            yield
        except BaseException:
            self.leave(received_s)
            raise

    def arrive(self, received_s: float | None) -> None:
        """The language model has it."""
        if received_s is not None:
            with self.locked() as rows:
                _write(rows, received_s, np.inf)

    def leave(self, received_s: float | None) -> None:
        """It has been answered, or refused on the way. Leaving twice does no harm."""
        if received_s is not None:
            with self.locked() as rows:
                rows["until"][rows["key"] == received_s] = 0.0

    def __len__(self) -> int:
        with self.locked() as rows:
            return _used(rows)

    def _enter(self, received_s: float) -> None:
        with self.locked() as rows:
            used = _used(rows)
            if used < self._max_requests:
                _write(rows, received_s, time.monotonic() + LEASE_S)
        self._refuse(used)

    def _refuse(self, used: int) -> None:
        if used >= self._max_requests:
            raise Unavailable(f"{used} requests wait for the language model or are answered, at most that many may")


def _used(rows: npt.NDArray[np.void]) -> int:
    return int(np.count_nonzero(rows["until"] > time.monotonic()))


def _write(rows: npt.NDArray[np.void], received_s: float, until: float) -> None:
    """Into its own row if it has one, else into a free one; a full table goes without."""
    own = np.flatnonzero((rows["key"] == received_s) & (rows["until"] > 0))
    free = own if len(own) else np.flatnonzero(rows["until"] <= time.monotonic())
    if len(free):
        rows[free[0]] = (received_s, until)
