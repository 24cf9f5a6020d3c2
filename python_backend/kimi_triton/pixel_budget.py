# SPDX-License-Identifier: Apache-2.0
"""How many bytes of decoded pixels may be between the preprocessor and the end of the vision step, over all processes.

Triton limits a queue by requests, and one request may hold a thousand times the pixels of another. The steps share a
small table in memory: the preprocessor enters what it hands on, the vision step strikes it out when its rows are made.
What is lost on the way, because its request was cancelled or a process died, is struck out after LEASE_S.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kimi_triton.errors import Unavailable
from kimi_triton.shared_path import shared_path
from kimi_triton.shared_table import SharedTable

MAX_PIXEL_BYTES = 256 * 1024 * 1024
LEASE_S = 120.0
ROWS = 4096
ROW = np.dtype([("key", np.uint64), ("num_bytes", np.int64), ("until", np.float64)])  # num_bytes 0: a free row


class PixelBudget(SharedTable):
    """Which requests have pixels on their way, and how many bytes. A vision step that starts again clears it."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        super().__init__(file, ROW, ROWS)
        self.max_bytes = max_bytes

    @classmethod
    def of_repository(cls, repository: Path, max_bytes: int) -> PixelBudget:
        """The budget of the servers of one model repository."""
        return cls(shared_path("pixels", repository), max_bytes)

    def refuse_when_full(self) -> None:
        """Raise Unavailable when nothing more would be let in; costs less than decoding a picture for it."""
        used = self.used_bytes()
        if used >= self.max_bytes:
            raise self._full(used)

    def enter(self, image_digest: npt.NDArray[np.uint8], num_bytes: int) -> None:
        """Let a request's pixels in, or raise Unavailable. One that is larger than the whole budget may go alone."""
        if not num_bytes:
            return
        with self.locked() as rows:
            used = _used(rows)
            free = np.flatnonzero(rows["num_bytes"] == 0)
            if (used and used + num_bytes > self.max_bytes) or not len(free):
                raise self._full(used)
            rows[free[0]] = (_key(image_digest), num_bytes, time.monotonic() + LEASE_S)

    def leave(self, image_digest: npt.NDArray[np.uint8]) -> None:
        """Strike one request with these images out; which of several equal ones does not matter."""
        if not len(image_digest):
            return
        with self.locked() as rows:
            found = np.flatnonzero((rows["key"] == _key(image_digest)) & (rows["num_bytes"] > 0))
            if len(found):
                rows[found[0]] = (0, 0, 0.0)

    def used_bytes(self) -> int:
        """Bytes of pixels on their way."""
        with self.locked() as rows:
            return _used(rows)

    def _full(self, used: int) -> Unavailable:
        return Unavailable(f"{used} bytes of pixels wait for the vision step, the limit is {self.max_bytes}")


def _used(rows: npt.NDArray[np.void]) -> int:
    rows["num_bytes"][rows["until"] < time.monotonic()] = 0
    return int(rows["num_bytes"].sum())


def _key(image_digest: npt.NDArray[np.uint8]) -> int:
    return int.from_bytes(hashlib.sha256(image_digest.tobytes()).digest()[:8], "little")
