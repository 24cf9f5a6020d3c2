# SPDX-License-Identifier: Apache-2.0
"""One crew after the other: a thread that starts a crew, gives it jobs, and replaces it when it is lost."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from kimi_triton.errors import ConfigError, KimiError, Unavailable
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.work_log import WorkLog
from kimi_triton.workers.crew import POLL_S, Crew, WorkerLost, started_crew
from kimi_triton.workers.exchange import Result
from kimi_triton.workers.messages import Progress, WorkerSettings


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Images for one group. `result` always comes to an end, with rows or an error for each of them."""

    images: Sequence[Tensor]
    grids: list[Grid]
    result: Future[Result] = field(default_factory=Future)

    @property
    def num_patches(self) -> int:
        return sum(map(num_patches, self.grids))

    def fail(self, error: KimiError) -> None:
        self.result.set_result([error] * len(self.grids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a group may take to get ready, and how long it may compute without getting on, in seconds."""

    start_s: float
    stall_s: float


class WorkerGroup:
    """Jobs wait while the crew is started again; a job whose crew is lost ends as Unavailable."""

    def __init__(
        self,
        name: str,
        settings: Sequence[WorkerSettings],
        hidden_size: int,
        timeouts: Timeouts,
        work_log: WorkLog,
        on_progress: Callable[[WorkerSettings, Progress], None],
    ) -> None:
        """`hidden_size` is the width of the rows; `on_progress` is called from the group's thread."""
        self.name = name
        self.ready: Future[None] = Future()  # of the first start; fails with ConfigError
        self.is_ready = False
        self.num_restarts = 0
        self.pids: list[int] = []
        self._settings = settings
        self._hidden_size = hidden_size
        self._timeouts = timeouts
        self._work_log = work_log
        self._on_progress = on_progress
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._next: Job | None = None  # taken from the queue, not begun
        self._stopping = threading.Event()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._closing:
            if not self._is_closed:
                self._jobs.put(job)
                return
        job.fail(Unavailable(f"{self.name} has stopped"))

    def ask_to_stop(self) -> None:
        """Unfinished jobs end as Unavailable."""
        self._stopping.set()
        self._jobs.put(None)

    def join(self) -> None:
        """Wait until the processes are gone, after `ask_to_stop`."""
        self._thread.join()

    def _live(self) -> None:
        while not self._stopping.is_set():
            try:
                with started_crew(
                    self._settings, self._hidden_size, self._timeouts.stall_s, self._stopping.is_set
                ) as crew:
                    self.pids = crew.pids
                    self._get_ready(crew)
                    self._serve(crew)
            except (WorkerLost, OSError, ConfigError) as exc:  # OSError: no process or no memory to be had
                self._after_loss(exc)
            finally:
                self.is_ready = False
        self._refuse_the_rest()

    def _get_ready(self, crew: Crew) -> None:
        crew.wait_ready(self._timeouts.start_s, self._report)
        self.is_ready = True
        if not self.ready.done():
            self.ready.set_result(None)

    def _report(self, index: int, progress: Progress) -> None:
        self._on_progress(self._settings[index], progress)

    def _serve(self, crew: Crew) -> None:
        while not self._stopping.is_set():
            crew.check_alive()  # a job that is not begun is not lost with its crew
            if self._next is not None:
                job, self._next = self._next, None
                self._do(job, crew)
            self._next = self._take_job(POLL_S)

    def _do(self, job: Job, crew: Crew) -> None:
        try:
            with self._work_log.timed(job.grids):
                result = crew.encode(job.images, job.grids)
        except Exception as exc:
            if not isinstance(exc, WorkerLost):
                traceback.print_exc()
            reason = str(exc) if isinstance(exc, WorkerLost) else f"failed: {type(exc).__name__}, see the log"
            job.fail(Unavailable(f"{self.name} {reason}; it is started again"))
            raise WorkerLost(reason) from exc
        job.result.set_result(result)

    def _after_loss(self, loss: Exception) -> None:
        """Decide when to start again: at once after serving, else when there is something to do."""
        if not self._stopping.is_set():
            sys.stderr.write(f"[kimi-triton] {self.name} {loss}\n")
        if not self.ready.done():  # the very first start
            self.ready.set_exception(ConfigError(f"{self.name} {loss}"))
            self._stopping.set()
        elif not self._stopping.is_set():
            self.num_restarts += 1
            if not self.is_ready:
                self._wait_for_need(loss)

    def _wait_for_need(self, loss: Exception) -> None:
        """The crew did not even start. Starting without end would only burn time."""
        if self._next is not None:
            self._next.fail(Unavailable(f"{self.name} {loss}"))
        self._next = self._take_job(None)

    def _take_job(self, timeout_s: float | None) -> Job | None:
        try:
            return self._jobs.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _refuse_the_rest(self) -> None:
        with self._closing:
            self._is_closed = True
        while self._next is not None or not self._jobs.empty():
            if self._next is not None:
                self._next.fail(Unavailable(f"{self.name} has stopped"))
            self._next = None if self._jobs.empty() else self._jobs.get()
