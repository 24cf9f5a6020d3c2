# SPDX-License-Identifier: Apache-2.0
"""Worker processes that do each job together, and the thread that owns their whole life.

start -> ready -> serve -> stop. A death or a stall fails the job at hand; then all of them are replaced.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait

import torch
from torch import Tensor

from kimi_triton.errors import ConfigError, KimiError, Unavailable
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.work_log import WorkLog
from kimi_triton.workers.buffers import anonymous_file
from kimi_triton.workers.exchange import Exchange, Result
from kimi_triton.workers.messages import Encode, Encoded, Failed, FromWorker, Progress, Ready, Start, WorkerSettings
from kimi_triton.workers.process import WorkerProcess

POLL_S = 0.2  # how often a group looks after its processes while nothing happens


class WorkerLost(Exception):
    """A process ended, reported a failure or stood still."""


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

    start_s: float = 600.0
    stall_s: float = 60.0


class WorkerGroup:
    """One process for each entry of `settings`; several of them share the weights of one model."""

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
        """Queue a job. It waits while the group is started again."""
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
                with self._processes() as (processes, exchange):
                    dtype = self._wait_ready(processes)
                    self._serve(processes, exchange, dtype)
            except WorkerLost as exc:
                self._after_loss(exc)
            finally:
                self.is_ready = False
        self._refuse_the_rest()

    @contextmanager
    def _processes(self) -> Iterator[tuple[list[WorkerProcess], Exchange]]:
        """One life of the group. Processes and buffers are gone when the `with` block is left."""
        with ExitStack() as stack:
            pixels, rows, rendezvous = (stack.enter_context(anonymous_file()) for _ in range(3))
            exchange = Exchange(pixels, rows, self._hidden_size)
            processes = []
            for settings in self._settings:
                process = WorkerProcess(Start(settings, pixels, rows, rendezvous))
                stack.callback(process.end)
                processes.append(process)
            self.pids = [process.pid for process in processes]
            yield processes, exchange
            for process in processes:
                process.ask_to_stop()

    def _wait_ready(self, processes: list[WorkerProcess]) -> torch.dtype:
        """The dtype of the rows, once every process has loaded its weights."""
        deadline = time.monotonic() + self._timeouts.start_s
        late = f"was not ready after {self._timeouts.start_s:g} s"
        dtypes: dict[int, torch.dtype] = {}
        while len(dtypes) < len(processes):
            index, message = self._next_message(processes, deadline, late)
            if isinstance(message, Progress):
                self._on_progress(self._settings[index], message)
            elif isinstance(message, Ready):
                dtypes[index] = message.dtype
        self.is_ready = True
        if not self.ready.done():
            self.ready.set_result(None)
        return dtypes[0]

    def _serve(self, processes: list[WorkerProcess], exchange: Exchange, dtype: torch.dtype) -> None:
        while not self._stopping.is_set():
            for process in processes:
                if not process.is_alive:  # the job that waits, if any, is not lost with it
                    raise WorkerLost(f"ended while idle ({process.how_it_ended()})")
            if self._next is not None:
                job, self._next = self._next, None
                self._do(job, processes, exchange, dtype)
            self._next = self._wait_job(POLL_S)

    def _do(self, job: Job, processes: list[WorkerProcess], exchange: Exchange, dtype: torch.dtype) -> None:
        try:
            with self._work_log.timed(job.grids):
                exchange.write_images(job.images)
                for process in processes:
                    process.send(Encode(job.grids))
                errors = self._wait_encoded(processes)
                result = exchange.take_rows(job.grids, dtype, errors)
            job.result.set_result(result)
        except Exception as exc:
            job.fail(Unavailable(f"{self.name} {exc}; it is started again"))
            raise WorkerLost(str(exc)) from exc

    def _wait_encoded(self, processes: list[WorkerProcess]) -> dict[int, str]:
        """Errors by image, once every process is done."""
        errors: dict[int, str] = {}
        num_waiting = len(processes)
        while num_waiting:
            deadline = time.monotonic() + self._timeouts.stall_s  # each message of any process puts it off
            _, message = self._next_message(processes, deadline, f"made no progress for {self._timeouts.stall_s:g} s")
            if isinstance(message, Encoded):
                errors |= message.errors
                num_waiting -= 1
        return errors

    def _wait_job(self, timeout_s: float | None) -> Job | None:
        try:
            return self._jobs.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _next_message(self, processes: list[WorkerProcess], deadline: float, late: str) -> tuple[int, FromWorker]:
        """The next message and whose it is. Raises WorkerLost on a death, a failure, a deadline (`late`) or a stop."""
        connections = [process.connection for process in processes]
        while not self._stopping.is_set():
            for connection in wait(connections, POLL_S):
                index = connections.index(connection)  # type: ignore[arg-type]  # one of those handed in
                try:
                    message = processes[index].receive()
                except (EOFError, OSError):
                    raise WorkerLost(f"ended ({processes[index].how_it_ended()})") from None
                if isinstance(message, Failed):
                    raise WorkerLost(f"failed: {message.reason}")
                return index, message
            if time.monotonic() > deadline:
                raise WorkerLost(late)
        raise WorkerLost("is stopping")

    def _after_loss(self, loss: WorkerLost) -> None:
        """Decide when to start again: at once after serving, else when there is something to do."""
        if self._stopping.is_set():
            return
        sys.stderr.write(f"[kimi-triton] {self.name} {loss}\n")
        if not self.ready.done():  # the very first start
            self.ready.set_exception(ConfigError(f"{self.name} {loss}"))
            self._stopping.set()
            return
        self.num_restarts += 1
        if not self.is_ready:
            if self._next is not None:
                self._next.fail(Unavailable(f"{self.name} {loss}"))
            self._next = self._wait_job(None)

    def _refuse_the_rest(self) -> None:
        with self._closing:
            self._is_closed = True
        while self._next is not None or not self._jobs.empty():
            if self._next is not None:
                self._next.fail(Unavailable(f"{self.name} has stopped"))
            self._next = None if self._jobs.empty() else self._jobs.get()
