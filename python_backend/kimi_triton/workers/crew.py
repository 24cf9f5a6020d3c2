# SPDX-License-Identifier: Apache-2.0
"""The processes that do each job together, from their start to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait

import torch
from torch import Tensor

from kimi_triton.vision.grids import Grid
from kimi_triton.workers.buffers import anonymous_file
from kimi_triton.workers.exchange import Exchange, Result
from kimi_triton.workers.messages import Encode, Encoded, Failed, FromWorker, Progress, Ready, Start, WorkerSettings
from kimi_triton.workers.process import WorkerProcess

POLL_S = 0.2  # how often a wait looks whether it has become pointless


class WorkerLost(Exception):
    """A process ended, reported a failure, or all stood still. Nothing can be asked of its crew any more."""


class Crew:
    """Several processes share the weights of one model; one process has all of them."""

    def __init__(
        self, processes: Sequence[WorkerProcess], exchange: Exchange, stall_s: float, is_stopping: Callable[[], bool]
    ) -> None:
        self._processes = processes
        self._exchange = exchange
        self._stall_s = stall_s
        self._is_stopping = is_stopping
        self._dtype = torch.float32  # of the rows, once ready

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_ready(self, timeout_s: float, on_progress: Callable[[int, Progress], None]) -> None:
        """Until every process has loaded its weights. Raises WorkerLost."""
        deadline = time.monotonic() + timeout_s
        num_ready = 0
        while num_ready < len(self._processes):
            index, message = self._next_message(deadline, f"was not ready after {timeout_s:g} s")
            if isinstance(message, Progress):
                on_progress(index, message)
            elif isinstance(message, Ready):
                self._dtype = message.dtype
                num_ready += 1

    def check_alive(self) -> None:
        """Raises WorkerLost when a process has ended without being asked anything."""
        for process in self._processes:
            if not process.is_alive:
                raise WorkerLost(f"ended while idle ({process.how_it_ended()})")

    def encode(self, images: Sequence[Tensor], grids: list[Grid]) -> Result:
        """Copies of the rows, or the error, of each image. Raises WorkerLost."""
        self._exchange.write_images(images)
        for process in self._processes:
            try:
                process.send(Encode(grids))
            except OSError:
                raise WorkerLost(f"ended ({process.how_it_ended()})") from None
        errors: dict[int, str] = {}
        num_done = 0
        while num_done < len(self._processes):
            deadline = time.monotonic() + self._stall_s  # put off by each message of any process
            _, message = self._next_message(deadline, f"made no progress for {self._stall_s:g} s")
            if isinstance(message, Encoded):
                errors |= message.errors
                num_done += 1
        return self._exchange.take_rows(grids, self._dtype, errors)

    def ask_to_stop(self) -> None:
        for process in self._processes:
            process.ask_to_stop()

    def _next_message(self, deadline: float, late: str) -> tuple[int, FromWorker]:
        """The next message and whose it is. Raises WorkerLost on a death, a failure, a deadline (`late`) or a stop."""
        connections = [process.connection for process in self._processes]
        while not self._is_stopping():
            for connection in wait(connections, POLL_S):
                index = connections.index(connection)  # type: ignore[arg-type]  # one of those handed in
                try:
                    message = self._processes[index].receive()
                except (EOFError, OSError):
                    raise WorkerLost(f"ended ({self._processes[index].how_it_ended()})") from None
                if isinstance(message, Failed):
                    raise WorkerLost(self._first_cause(message))
                return index, message
            if time.monotonic() > deadline:
                raise WorkerLost(late)
        raise WorkerLost("is stopping")

    def _first_cause(self, message: Failed) -> str:
        """When a rank is killed the others fail in their next collective; then the kill is what matters."""
        time.sleep(POLL_S)
        killed = [process for process in self._processes if process.was_killed]
        return f"ended ({killed[0].how_it_ended()})" if killed else f"failed: {message.reason}"


@contextmanager
def started_crew(
    settings: Sequence[WorkerSettings], hidden_size: int, stall_s: float, is_stopping: Callable[[], bool]
) -> Iterator[Crew]:
    """A process for each entry of `settings`, not ready yet. All are gone and reaped when the `with` block is left."""
    with ExitStack() as stack:
        pixels, rows, rendezvous = (stack.enter_context(anonymous_file()) for _ in range(3))
        exchange = Exchange(pixels, rows, hidden_size)
        processes = []
        for one in settings:
            process = WorkerProcess(Start(one, pixels, rows, rendezvous))
            stack.callback(process.end)
            processes.append(process)
        crew = Crew(processes, exchange, stall_s, is_stopping)
        yield crew
        crew.ask_to_stop()
