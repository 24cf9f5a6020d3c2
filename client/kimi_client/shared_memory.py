# SPDX-License-Identifier: Apache-2.0
"""Large inputs by system shared memory, for a client on the server's own host.

A region lives for one request: made, announced to the server, named in the request instead of the bytes, withdrawn.
Triton refuses to withdraw a region that a request is still reading, which happens when a call is abandoned early;
such a region stays on a list and is withdrawn later.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

from kimi_client.errors import KimiClientError
from kimi_client.tensors import pack_bytes, packed_size

FROM_BYTES = 1 << 20  # smaller inputs are faster inside the message
CLOSE_TRIES = 20
CLOSE_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Region:
    """A packed BYTES tensor in shared memory: the name the server knows it by, and its size in bytes."""

    name: str
    byte_size: int

    @property
    def key(self) -> str:
        """The POSIX name of the segment, which is its file's name in /dev/shm after a slash."""
        return f"/{self.name}"


class SharedInputs:
    """Puts the large inputs of requests into shared memory, or nothing at all where that is switched off.

    `register(region)` and `unregister(name)` are the protocol's calls.
    """

    def __init__(
        self,
        register: Callable[[Region], Awaitable[None]],
        unregister: Callable[[str], Awaitable[None]],
        *,
        enabled: bool,
    ) -> None:
        self._from_bytes = FROM_BYTES if enabled else math.inf
        self._register = register
        self._unregister = unregister
        self._left_over: set[str] = set()

    @asynccontextmanager
    async def share(self, inputs: Mapping[str, Sequence[bytes]]) -> AsyncIterator[dict[str, Region]]:
        """Yield a region for each input that is large; the regions end with the block."""
        segments: list[SharedMemory] = []
        regions: dict[str, Region] = {}
        try:
            for name, elements in inputs.items():
                if packed_size(elements) >= self._from_bytes:
                    region, segment = _write(elements)
                    segments.append(segment)
                    await self._register(region)
                    regions[name] = region
            yield regions
        finally:
            for segment in segments:
                segment.close()
                segment.unlink()
            self._left_over.update(region.name for region in regions.values())
            await self._withdraw()

    async def close(self) -> None:
        """Withdraw all regions, waiting a little for the requests that still read them."""
        for _ in range(CLOSE_TRIES):
            await self._withdraw()
            if not self._left_over:
                return
            await asyncio.sleep(CLOSE_PAUSE_S)

    async def _withdraw(self) -> None:
        for name in tuple(self._left_over):
            try:
                await self._unregister(name)
            except KimiClientError:
                continue  # still being read, or the server is gone; the next request or close tries again
            self._left_over.discard(name)


def _write(elements: Sequence[bytes]) -> tuple[Region, SharedMemory]:
    packed = pack_bytes(elements)
    name = f"kimi_client_{os.getpid()}_{uuid.uuid4().hex[:12]}"  # tells whose it is, should it ever be left behind
    segment = SharedMemory(name, create=True, size=len(packed))
    assert segment.buf is not None  # it is None only after close
    segment.buf[: len(packed)] = packed
    return Region(segment.name, len(packed)), segment
