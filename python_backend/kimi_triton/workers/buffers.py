# SPDX-License-Identifier: Apache-2.0
"""Memory that a group of processes shares. It has no name: when all have ended, however they ended, it is gone."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

CAPACITY_BYTES = 64 << 30  # addresses, not memory: pages come into being when they are first written
KEEP_BYTES = 256 << 20


@contextmanager
def anonymous_file() -> Iterator[int]:
    """The descriptor of an empty file in memory, for child processes to inherit."""
    fd = os.memfd_create("kimi-triton")
    try:
        yield fd
    finally:
        os.close(fd)


class SharedBuffer:
    """The memory behind an anonymous file, for one job after the other."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, CAPACITY_BYTES)
        self._memory = mmap.mmap(fd, CAPACITY_BYTES)

    def tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """The first bytes as a tensor that shares them."""
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape)).view(shape)

    def shrink(self, used_bytes: int) -> None:
        """Give the pages of an unusually large job back to the system; smaller ones stay for the next job."""
        if used_bytes > KEEP_BYTES:
            self._memory.madvise(mmap.MADV_REMOVE, 0, -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
