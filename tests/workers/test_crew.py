# SPDX-License-Identifier: Apache-2.0
"""What a crew makes of the messages of its processes, with pipes in their place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch

from kimi_triton.workers.buffers import anonymous_file
from kimi_triton.workers.crew import Crew, WorkerLost
from kimi_triton.workers.exchange import Exchange
from kimi_triton.workers.messages import Advancing, Encode, Encoded, Failed, Progress, Ready

STALL_S = 2.0
HIDDEN = 8


class Piped:
    """The parent's side of a process that is not there."""

    pid = 1

    def __init__(self) -> None:
        self.connection: Connection
        self.connection, self.peer = Pipe()
        self.is_alive, self.was_killed = True, False

    def send(self, message: Encode) -> None:
        self.connection.send(message)

    def receive(self) -> object:
        return self.connection.recv()

    def how_it_ended(self) -> str:
        return "SIGKILL"


@contextmanager
def crew_of(num_processes: int) -> Iterator[tuple[Crew, list[Piped]]]:
    processes = [Piped() for _ in range(num_processes)]
    with anonymous_file() as pixels, anonymous_file() as rows:
        yield Crew(processes, Exchange(pixels, rows, HIDDEN), STALL_S, lambda: False), processes  # type: ignore[arg-type]


def encode(crew: Crew) -> list[object]:
    return list(crew.encode([torch.zeros(8, 3, 14, 14, dtype=torch.uint8)], [(1, 2, 4)]))


def loss(act: Callable[[], object]) -> str:
    """Why the crew is given up."""
    with pytest.raises(WorkerLost) as caught:
        act()
    return str(caught.value)


def test_all_must_be_ready_and_progress_is_passed_on() -> None:
    with crew_of(2) as (crew, (one, other)):
        heard: list[tuple[int, Progress]] = []
        one.peer.send(Ready(torch.bfloat16))
        other.peer.send(Progress(1, 2))
        other.peer.send(Ready(torch.bfloat16))
        crew.wait_ready(10, lambda index, message: heard.append((index, message)))
        assert heard == [(1, Progress(1, 2))]
        with pytest.raises(WorkerLost, match=r"was not ready after 0\.1 s"):
            crew.wait_ready(0.1, lambda _index, _message: None)


def test_a_worker_that_gets_on_is_not_stalled_however_long_it_takes() -> None:
    with crew_of(2) as (crew, (slow, quick)):

        def work() -> None:
            quick.peer.send(Encoded({}))
            for _ in range(8):
                time.sleep(STALL_S / 4)
                slow.peer.send(Advancing())
            slow.peer.send(Encoded({}))

        worker = threading.Thread(target=work)
        start = time.monotonic()
        worker.start()
        (rows,) = encode(crew)
        worker.join()
        assert isinstance(rows, torch.Tensor)
        assert rows.shape == (2, HIDDEN)
        assert time.monotonic() - start > 2 * STALL_S * 0.9


def test_silence_is_a_stall() -> None:
    with crew_of(2) as (crew, (one, _)):
        one.peer.send(Encoded({}))
        assert loss(lambda: encode(crew)) == "made no progress for 2 s"


def test_a_kill_counts_more_than_what_it_does_to_the_others() -> None:
    with crew_of(2) as (crew, (victim, survivor)):
        victim.was_killed = True
        survivor.peer.send(Failed("RuntimeError, see the log"))
        assert loss(lambda: encode(crew)) == "ended (SIGKILL)"


def test_a_failure_and_an_end_are_told() -> None:
    with crew_of(1) as (crew, (process,)):
        process.peer.send(Failed("OutOfMemoryError, see the log"))
        assert loss(lambda: encode(crew)) == "failed: OutOfMemoryError, see the log"
    with crew_of(1) as (crew, (process,)):
        process.peer.close()
        assert loss(lambda: encode(crew)) == "ended (SIGKILL)"
    with crew_of(1) as (crew, (process,)):
        process.is_alive = False
        assert loss(crew.check_alive) == "ended while idle (SIGKILL)"
