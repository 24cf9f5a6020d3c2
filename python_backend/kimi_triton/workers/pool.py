# SPDX-License-Identifier: Apache-2.0
"""Worker processes as one encoder: images in, rows out, whoever computed them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from kimi_triton.errors import KimiError
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.work_log import WorkLog
from kimi_triton.workers.balance import assign_images
from kimi_triton.workers.exchange import Result
from kimi_triton.workers.group import Job, WorkerGroup


class WorkerPool:
    """Spreads the images of a call over groups. Threads may call `encode` at the same time."""

    def __init__(self, groups: Sequence[WorkerGroup], work_log: WorkLog) -> None:
        self.groups = groups
        self.work_log = work_log
        self._loads = [0] * len(groups)  # patches that each group has not answered yet
        self._lock = threading.Lock()

    def start(self) -> None:
        """Return when every group is ready. Raises ConfigError, and leaves no process behind."""
        for group in self.groups:
            group.start()
        try:
            for group in self.groups:
                group.ready.result()
        except BaseException:
            self.stop()
            raise

    def encode(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> Sequence[Tensor | KimiError]:
        """The rows of each image, in order; Unavailable for those whose worker was lost."""
        results: dict[int, Tensor | KimiError] = {}
        for indices, job in self._submit(images, grids):
            results |= zip(indices, job.result.result(), strict=True)
        return [results[index] for index in range(len(images))]

    @property
    def num_restarts(self) -> int:
        return sum(group.num_restarts for group in self.groups)

    def stop(self) -> None:
        """Every process is gone on return."""
        for group in self.groups:
            group.ask_to_stop()
        for group in self.groups:
            group.join()

    def _submit(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> list[tuple[list[int], Job]]:
        """Give each group its share; returns the images of each job."""
        submitted = []
        for number, indices in self._assign([num_patches(grid) for grid in grids]).items():
            job = Job([images[index] for index in indices], [grids[index] for index in indices])
            job.result.add_done_callback(partial(self._unload, number, job.num_patches))
            submitted.append((indices, job))
            self.groups[number].submit(job)
        return submitted

    def _assign(self, patches: list[int]) -> dict[int, list[int]]:
        """Images by group. Groups that are being started again get none while others are ready."""
        with self._lock:
            ready = [number for number, group in enumerate(self.groups) if group.is_ready]
            chosen = ready or list(range(len(self.groups)))
            shares = assign_images(patches, [self._loads[number] for number in chosen])
            assigned = {number: indices for number, indices in zip(chosen, shares, strict=True) if indices}
            for number, indices in assigned.items():
                self._loads[number] += sum(patches[index] for index in indices)
            return assigned

    def _unload(self, number: int, patches: int, _result: Future[Result]) -> None:
        with self._lock:
            self._loads[number] -= patches
