# SPDX-License-Identifier: Apache-2.0
"""`make leak`: 2,000 mixed requests, after which the memory of every process and /dev/shm must have levelled off."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kimi_client import AsyncKimiClient, KimiClientError
from kimi_client.load.mix import make_jpeg

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(3600)]

REQUESTS = 2000
AT_ONCE = 8
CHECKPOINTS = 10  # memory is read so many times
SETTLED = 5  # readings at the end among which nothing may grow any more
ALLOWED_GROWTH = 0.05  # of a process, from the first of these readings to the last
ALLOWED_MIB = 8.0  # small processes may grow by a few allocator arenas


class Memory:
    """Resident MiB of the test's own process and of every process of the server, and MiB in /dev/shm that these map."""

    def __init__(self, server_pid: int) -> None:
        server = psutil.Process(server_pid)
        self._processes = [psutil.Process(), server, *server.children(recursive=True)]
        self.names = [f"{self._name(process)} {process.pid}" for process in self._processes] + ["/dev/shm"]

    def read(self) -> list[float]:
        mapped = {Path(region.path) for process in self._processes for region in process.memory_maps()}
        segments = [path for path in mapped if path.is_relative_to("/dev/shm") and path.exists()]
        shared = sum(path.stat().st_size for path in segments)
        return [process.memory_info().rss / 2**20 for process in self._processes] + [shared / 2**20]

    def _name(self, process: psutil.Process) -> str:
        models = [part for part in process.cmdline() if part.endswith("model.py")]
        return Path(models[0]).parts[-3] if models else process.name()


def kinds(rng: random.Random, client: AsyncKimiClient) -> Iterator[Awaitable[Any]]:
    """Requests of every kind, in random order and without end: whole, streamed, left early, wrong, timed out."""
    pictures = [make_jpeg(28 * rng.randint(1, 12), 28 * rng.randint(1, 12), seed) for seed in range(40)]
    while True:
        images = rng.sample(pictures, rng.choice((0, 1, 1, 2)))
        options: dict[str, Any] = {"max_tokens": rng.randint(1, 16), "seed": rng.randint(0, 99)}
        make: Callable[[], Awaitable[Any]] = rng.choice(
            (
                functools.partial(client.ask, "What is this?", images, **options),
                functools.partial(client.chat, [{"role": "user", "content": "hello"}], **options),
                functools.partial(read, client, images, options, at_most=99),
                functools.partial(read, client, images, options, at_most=2),
                functools.partial(client.embed, images or pictures[:1]),
                functools.partial(client.ask, "What is this?", [b"no picture"], **options),
                functools.partial(client.ask, "story", images, timeout_s=0.05, max_tokens=400),
            )
        )
        yield make()


async def read(client: AsyncKimiClient, images: list[bytes], options: dict[str, Any], at_most: int) -> None:
    async with client.stream("What is this?", images, **options) as stream:
        count = 0
        async for _ in stream:
            count += 1
            if count == at_most:
                break


async def send(requests: Iterator[Awaitable[Any]], count: int) -> int:
    """Send so many requests, a few at once, and return how many were answered."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(request: Awaitable[Any]) -> int:
        async with gate:
            with suppress(KimiClientError):
                await request
                return 1
        return 0

    return sum(await asyncio.gather(*(one(next(requests)) for _ in range(count))))


def test_memory_levels_off_over_2000_mixed_requests(live_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def tell(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"{text}\n")

    async def run() -> list[list[float]]:
        readings = []
        grpc, http = f"{live_server.grpc_url}", f"http://{live_server.http_url}"
        async with (
            AsyncKimiClient(grpc, shared_memory=True) as by_grpc,
            AsyncKimiClient(http) as by_http,
        ):
            sources = [kinds(random.Random(seed), client) for seed, client in enumerate((by_grpc, by_http))]
            answered = 0
            for _ in range(CHECKPOINTS):
                for source in sources:
                    answered += await send(source, REQUESTS // CHECKPOINTS // len(sources))
                readings.append(memory.read())
        tell(f"\n{answered} of {REQUESTS} requests were answered, the others refused or timed out on purpose")
        return readings

    memory = Memory(live_server.pid)
    readings = asyncio.run(run())
    grown = []
    for name, values in zip(memory.names, zip(*readings, strict=True), strict=True):
        tell(f"{name:<28} MiB: " + " ".join(f"{value:.0f}" for value in values))
        first, last = values[-SETTLED], values[-1]
        if last - first > max(ALLOWED_MIB, ALLOWED_GROWTH * first):
            grown.append(f"{name} from {first:.0f} to {last:.0f} MiB")
    assert grown == []
