# SPDX-License-Identifier: Apache-2.0
"""Shared memory of our servers: named so that it can be told whose it is, and removed when nobody's.

Every server's segments begin with a prefix of its own, and a locked file of that prefix says that it lives. The lock
vanishes with its process however that ends, also between containers that share /dev/shm but not process numbers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

SHM = Path("/dev/shm")
LOCK = "lock"


class Segments:
    """The segments of one server, from now until `remove`."""

    def __init__(self, folder: Path = SHM) -> None:
        self._folder = folder
        remove_abandoned(folder)
        self.prefix = f"kimi_triton_{os.getpid()}_{secrets.token_hex(4)}_"
        self._lock = _locked(folder / f"{self.prefix}{LOCK}")

    def remove_contents(self) -> None:
        """Remove all there are; their server must have ended, and another may start."""
        for segment in self._folder.glob(f"{self.prefix}*"):
            if not segment.name.endswith(LOCK):
                segment.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all and give the name up."""
        _remove(self._folder, self.prefix)
        os.close(self._lock)

    def remove_named(self, name: str) -> None:
        """Remove one, by the name that its process was started with."""
        if name.startswith(self.prefix):
            (self._folder / name).unlink(missing_ok=True)


def remove_abandoned(folder: Path = SHM) -> None:
    """Remove what servers left behind that were killed together with the process that looked after them."""
    for lock in folder.glob(f"kimi_triton_*_{LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:  # gone by now, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(folder, lock.name.removesuffix(LOCK))
        finally:
            os.close(descriptor)


def _locked(file: Path) -> int:
    """The descriptor that holds the lock. Somebody may have removed the file between opening and locking it."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _remove(folder: Path, prefix: str) -> None:
    for segment in sorted(folder.glob(f"{prefix}*"), key=lambda file: file.name.endswith(LOCK)):  # the lock last
        segment.unlink(missing_ok=True)
