# SPDX-License-Identifier: Apache-2.0
"""What encoders did, kept until somebody counts it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.packing import pack_images


@dataclass(frozen=True, slots=True)
class Forward:
    """One pass through the vision tower."""

    num_images: int
    num_patches: int


@dataclass(frozen=True, slots=True)
class Work:
    """Images that one process, or one group of processes, encoded together."""

    milliseconds: float
    forwards: list[Forward]


class WorkLog:
    """Filled and drained by any thread."""

    def __init__(self, max_patches_per_forward: int) -> None:
        self._max_patches = max_patches_per_forward
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()

    @contextmanager
    def timed(self, grids: Sequence[Grid]) -> Iterator[None]:
        """Note images that are encoded inside the `with` block, unless it raises."""
        start = time.perf_counter()
        yield
        milliseconds = 1000 * (time.perf_counter() - start)
        patches = [num_patches(grid) for grid in grids]
        packs = pack_images(patches, self._max_patches)
        forwards = [Forward(len(pack), sum(patches[pack.start : pack.stop])) for pack in packs]
        self._work.put(Work(milliseconds, forwards))

    def drain(self) -> Iterator[Work]:
        """What was noted since the last time."""
        while True:
            try:
                yield self._work.get_nowait()
            except queue.Empty:
                return
