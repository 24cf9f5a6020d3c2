# SPDX-License-Identifier: Apache-2.0
"""The processes behind a server's Python models. Triton neither says that one has died nor starts it again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class Stub:
    """One model instance's process; `segment` is the name of its shared memory."""

    pid: int
    model: str
    segment: str


def find_stubs(server_pid: int) -> list[Stub]:
    """Those of the server that run now."""
    stubs = []
    for folder in PROC.iterdir():
        if folder.name.isdigit() and _parent(folder) == server_pid:
            stub = _as_stub(int(folder.name), _command_line(folder))
            if stub is not None:
                stubs.append(stub)
    return stubs


def is_alive(pid: int) -> bool:
    """False for a zombie too: Triton does not collect what is left of its stubs."""
    return _stat(PROC / str(pid))[:1] not in ([], ["Z"])


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it; a debugger that looks into it is something else."""
    return _stat(PROC / str(pid))[:1] == ["T"]


def busy_seconds(pids: Iterable[int]) -> float:
    """How long these processes and their children have computed or waited for a core; of those gone, nothing.

    On a crowded machine the waiting tells a process that is kept from its work from one that has none.
    """
    wanted = set(pids)
    folders = [folder for folder in PROC.iterdir() if folder.name.isdigit()]
    stats = [(folder, _stat(folder)) for folder in folders]
    family = [
        (folder, fields)
        for folder, fields in stats
        if len(fields) > 12 and (int(folder.name) in wanted or int(fields[1]) in wanted)
    ]
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in family)
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_waited_ns(folder) for folder, _ in family) / 1e9


def _waited_ns(folder: Path) -> int:
    """Of all threads that a process has now; 0 where the system does not count it."""
    waited = 0
    for file in folder.glob("task/*/schedstat"):
        with suppress(OSError):  # the thread has ended
            waited += int(file.read_text().split()[1])
    return waited


def _as_stub(pid: int, command: list[str]) -> Stub | None:
    """Its command, behind a shell or not: `.../triton_python_backend_stub .../MODEL/VERSION/model.py SEGMENT ...`."""
    for place, word in enumerate(command[:-2]):
        if word.endswith(STUB):
            return Stub(pid, Path(command[place + 1]).parent.parent.name, command[place + 2])
    return None


def _command_line(folder: Path) -> list[str]:
    try:
        return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _parent(folder: Path) -> int:
    fields = _stat(folder)
    return int(fields[1]) if len(fields) > 1 else 0


def _stat(folder: Path) -> list[str]:
    """State, parent, ... of a process; nothing when it has gone. Its name, in front of them, may hold anything."""
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
