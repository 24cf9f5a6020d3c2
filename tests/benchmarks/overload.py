# SPDX-License-Identifier: Apache-2.0
"""Four times as many requests as a system can answer: how many it still answers, and what its processors do."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psutil

from tests.benchmarks.traffic import Counts, Traffic
from tests.system import System


async def overload(system: System, seconds: float) -> tuple[float, Counts]:
    """Goodput at four times the best rate, as a share of it; and what became of the requests."""
    best = 0.0
    for num_callers in (1, 2, 4, 8, 16):
        async with Traffic(system.http) as traffic:
            await traffic.learn()
            stop = asyncio.Event()
            load = asyncio.create_task(traffic.closed_loop(num_callers, stop, bad_share=0))
            await asyncio.sleep(seconds / 6)
            rate = traffic.counts.ends["answered"] / (seconds / 6)
            stop.set()
            await load
        print(f"{num_callers} callers: {rate:.1f} answers/s", flush=True)
        best = max(best, rate)
    before = {name: rss for name, (_, rss) in usage(system).items()}
    async with Traffic(system.http) as traffic:
        await traffic.learn()
        computed = {name: cpu_s for name, (cpu_s, _) in usage(system).items()}
        start = time.monotonic()
        await traffic.open_loop(4 * best, seconds)
        passed = time.monotonic() - start
        after = usage(system)
    goodput = traffic.counts.ends["answered"] / passed
    ends = dict(traffic.counts.ends)
    print(f"{4 * best:.1f} requests/s offered: {goodput:.1f} answers/s, {ends}, {traffic.counts.errors.most_common(3)}")
    shares = {name: round((cpu_s - computed.get(name, 0.0)) / passed, 2) for name, (cpu_s, _) in after.items()}
    print(f"cores used by each process, this program is `generator`: {shares}")
    print(f"MB before and after: { {name: [before.get(name), rss] for name, (_, rss) in after.items()} }")
    print(f"health {system.health_state()}", flush=True)
    return goodput / best, traffic.counts


def usage(system: System) -> dict[str, tuple[float, int]]:
    """Processor seconds so far and resident MB by model; two processes of a model are added up."""
    used: dict[str, tuple[float, int]] = {}
    processes = [psutil.Process(), psutil.Process(system.process.pid), system.triton, *system.triton.children()]
    for process in processes:
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        name = _name(process, system)
        times = process.cpu_times()
        cpu_s, rss = used.get(name, (0.0, 0))
        used[name] = cpu_s + times.user + times.system, rss + process.memory_info().rss // 1_000_000
    return used


def _name(process: psutil.Process, system: System) -> str:
    if process.pid == os.getpid():
        return "generator"
    if process.pid == system.process.pid:
        return "serve"
    return next((Path(word).parents[1].name for word in process.cmdline() if word.endswith("model.py")), "server")
