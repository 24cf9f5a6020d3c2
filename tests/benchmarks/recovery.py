# SPDX-License-Identifier: Apache-2.0
"""How long a running system takes from a fault to right answers, and where that time goes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psutil

from tests.benchmarks.traffic import Traffic
from tests.system import System

# Its own requests are counted with the others. It returns the process that must be gone when all is well again.
Fault = Callable[[Traffic], Awaitable[psutil.Process | None]]

CALLERS = 4
RECOVER_WITHIN_S = 300.0
NOTICED = re.compile(r"loading \w+ again: |starting the server again: ")
LOADED = re.compile(r"is loaded again after .*|the server is ready again after .*")


class Healing:
    """When the watcher of a system noticed something and when it had repaired it, by what it prints."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._begin = len(system.printed())
        self.start = time.monotonic()
        self.noticed_s: float | None = None
        self.loaded_s: float | None = None

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            text = self._system.printed()[self._begin :]
            if self.noticed_s is None and NOTICED.search(text):
                self.noticed_s = time.monotonic() - self.start
            if self.loaded_s is None and LOADED.search(text):
                self.loaded_s = time.monotonic() - self.start
            await asyncio.sleep(0.05)

    def summary(self) -> str:
        if self.noticed_s is None:
            return "the watcher had nothing to do"
        loaded = "never" if self.loaded_s is None else f"after {self.loaded_s:.1f} s"
        return f"noticed after {self.noticed_s:.1f} s, loaded again {loaded}"


async def recovered(
    system: System, traffic: Traffic, victim: psutil.Process | None, since: float
) -> tuple[float, float]:
    """Seconds from `since` until every good kind of request is answered right, and until every stage is well too."""
    right_s = None
    while time.monotonic() - since < RECOVER_WITHIN_S:
        async with Traffic(system.http) as probe:
            probe.expected = traffic.expected
            await asyncio.gather(*(probe.one(kind) for kind in traffic.expected))
            is_right = probe.counts.ends["answered"] == len(traffic.expected) and await probe.can_cancel()
        if is_right:
            right_s = time.monotonic() - since if right_s is None else right_s
            if is_gone(victim) and await asyncio.to_thread(system.is_ready):
                return right_s, time.monotonic() - since
        else:
            right_s = None
        await asyncio.sleep(0.1)
    raise SystemExit(f"no recovery: {system.health_state()} {probe.counts.errors}")


async def under_load(system: System, traffic: Traffic, name: str, fault: Fault) -> float:
    """Do `fault` while callers ask and a twentieth of them asks badly; returns seconds to recover."""
    stop = asyncio.Event()
    load = asyncio.create_task(traffic.closed_loop(CALLERS, stop, bad_share=0.05))
    await asyncio.sleep(1)
    healing = Healing(system)
    following = asyncio.create_task(healing.follow())
    victim = await fault(traffic)
    await asyncio.sleep(1)  # the watcher may not have noticed yet
    right_s, well_s = await recovered(system, traffic, victim, healing.start)
    stop.set()
    await load
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    print(
        f"{name}: {healing.summary()}, right answers after {right_s:.1f} s, every stage well after {well_s:.1f} s; "
        f"so far {dict(traffic.counts.ends)}",
        flush=True,
    )
    return well_s


def is_gone(process: psutil.Process | None) -> bool:
    """A frozen process must have been ended; what is left of a killed one may wait to be collected."""
    return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
