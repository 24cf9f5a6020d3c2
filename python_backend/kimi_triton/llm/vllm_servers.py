# SPDX-License-Identifier: Apache-2.0
"""Several vLLM servers of one checkpoint: which of them to ask next, and how they are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import aiohttp

from kimi_triton.errors import ConfigError

logger = logging.getLogger(__name__)

NETWORK_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """How servers are treated. Times in seconds."""

    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 60.0  # silence after which a server is taken for dead, also before the first token
    start_timeout_s: float = 600.0  # how long the first server may take to come up
    attempts: int = 3  # for one request, over all servers
    retry_after_s: float = 0.25  # before a server is asked again that has just failed
    look_every_s: float = 2.0
    read_every_s: float = 0.04  # tokens of one answer that come faster than this are handed on together
    max_live: int = 272  # requests at once


@dataclass(slots=True, eq=False)
class VllmServer:
    """One server. Its fields belong to the event loop of the engine."""

    url: str
    num_live: int = 0  # requests of ours that it works on
    is_up: bool = True  # until it is seen to fail
    max_model_len: int | None = None  # tokens, once it has told

    def mark(self, is_up: bool, why: str = "") -> None:
        if is_up != self.is_up:
            logger.warning("vLLM at %s %s", self.url, "answers again" if is_up else f"is taken for down: {why}")
        self.is_up = is_up


class ServerPool:
    """Chooses servers and looks after those that are down."""

    def __init__(self, urls: Sequence[str], settings: VllmSettings) -> None:
        self.servers = [VllmServer(url) for url in urls]
        self._settings = settings
        self._timeout = aiohttp.ClientTimeout(total=settings.connect_timeout_s)

    def choose(self, tried: Collection[VllmServer]) -> VllmServer:
        """The least loaded server that is up and was not tried, else the best of what is left."""
        return min(self.servers, key=lambda server: (server in tried, not server.is_up, server.num_live))

    def is_up(self) -> bool:
        return any(server.is_up for server in self.servers)

    async def wait_for_one(self, session: aiohttp.ClientSession) -> None:
        """Return when a server is up. Raises ConfigError when none is in time."""
        give_up_at = time.monotonic() + self._settings.start_timeout_s
        await self.look(session)
        while not self.is_up():
            if time.monotonic() > give_up_at:
                urls = ", ".join(server.url for server in self.servers)
                raise ConfigError(
                    f"no vLLM server was ready within {self._settings.start_timeout_s:.0f} s at {urls}; "
                    "`kimi-triton llm-command` prints how to start one"
                )
            await asyncio.sleep(min(1.0, self._settings.look_every_s))
            await self.look(session)

    async def keep_looking(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(self._settings.look_every_s)
            await self.look(session)

    async def look(self, session: aiohttp.ClientSession) -> None:
        """Ask every server for its health."""
        await asyncio.gather(*(self._look_at(server, session) for server in self.servers))

    async def _look_at(self, server: VllmServer, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get(f"{server.url}/health", timeout=self._timeout) as response:
                if response.status != 200:
                    return server.mark(False, f"its health is HTTP {response.status}")
            if server.max_model_len is None:
                server.max_model_len = await self._max_model_len(server, session)
        except (*NETWORK_FAILURES, ValueError, LookupError, TypeError) as exc:
            return server.mark(False, failure_text(exc))
        return server.mark(True)

    async def _max_model_len(self, server: VllmServer, session: aiohttp.ClientSession) -> int:
        async with session.get(f"{server.url}/v1/models", timeout=self._timeout) as response:
            models = await response.json()
        return int(models["data"][0]["max_model_len"])


def failure_text(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
