# SPDX-License-Identifier: Apache-2.0
"""A small table in memory that the processes of one server share."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class SharedTable:
    """`num_rows` rows of type `row`, all zero at first, in the file `file`. For any thread of any process."""

    def __init__(self, file: Path, row: np.dtype[Any], num_rows: int) -> None:
        self.file = file
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._descriptor, num_rows * row.itemsize)
        self._rows = np.frombuffer(mmap.mmap(self._descriptor, num_rows * row.itemsize), row)
        self._thread_lock = threading.Lock()  # the lock of the file is the whole process's

    @contextmanager
    def locked(self) -> Iterator[npt.NDArray[Any]]:
        """The rows, which nobody else reads or writes meanwhile."""
        with self._thread_lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # ends with its process
            try:
                yield self._rows
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def clear(self) -> None:
        """Make every row zero."""
        with self.locked() as rows:
            rows[:] = np.zeros(1, rows.dtype)

    def remove(self) -> None:
        """Remove the file, when its server has ended."""
        self.file.unlink(missing_ok=True)
