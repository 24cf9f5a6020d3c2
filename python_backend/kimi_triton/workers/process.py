# SPDX-License-Identifier: Apache-2.0
"""The parent's side of one worker process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from kimi_triton.errors import ConfigError
from kimi_triton.workers.messages import Encode, FromWorker, Start, Stop, WorkerSettings

STOP_TIMEOUT_S = 5.0


class WorkerProcess:
    """A started process and the socket to it. Whoever creates one must `end` it."""

    def __init__(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [interpreter(), "-m", "kimi_triton.workers.worker", str(theirs.fileno())],
                env={**os.environ, **_environment(start.settings)},
                pass_fds=(theirs.fileno(), start.pixels_fd, start.rows_fd, start.rendezvous_fd),
                stdin=subprocess.DEVNULL,
            )
        self.connection: Connection = Connection(ours.detach())
        self._was_asked = False
        self.connection.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        return (self._process.poll() or 0) < 0

    def how_it_ended(self) -> str:
        """Of a process that is gone or going: its exit code, or the name of the signal."""
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def send(self, message: Encode) -> None:
        """Raises OSError when the process is gone."""
        self.connection.send(message)

    def receive(self) -> FromWorker:
        """The next message. Raises EOFError or OSError when the process is gone."""
        message: FromWorker = self.connection.recv()
        return message

    def ask_to_stop(self) -> None:
        """Let it end by itself; `end` waits a moment for that."""
        with contextlib.suppress(OSError):
            self.connection.send(Stop())
            self._was_asked = True

    def end(self) -> None:
        """Gone and reaped on return, by force unless it was asked to stop and does."""
        if self._was_asked:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        self.connection.close()


def _environment(settings: WorkerSettings) -> dict[str, str]:
    """In place before the process imports torch. Ranks of one machine talk over loopback, whatever its name means."""
    return {
        "CUDA_VISIBLE_DEVICES": settings.visible_device or "",
        "OMP_NUM_THREADS": str(settings.num_threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def interpreter() -> str:
    """The Python to start workers with. Inside Triton's stub sys.executable may be empty or the stub itself."""
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    found = shutil.which("python3")
    if found is None:
        raise ConfigError("there is no python3 on PATH to start vision workers with")
    return found
