# SPDX-License-Identifier: Apache-2.0
"""`make drill`: everything that goes wrong in production, done to a running system under load.

Each fault must be followed by right answers without a person; no request may be lost without an answer or an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from kimi_triton.demo.tiny import write_tiny_checkpoint
from tests.benchmarks.measure import finish
from tests.benchmarks.traffic import Counts, Traffic
from tests.system import System

CALLERS = 4
RECOVER_WITHIN_S = 300.0
SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
LIMITS = ("--max-waiting", "32", "--llm-max-waiting", "32")
MODELS = ("preprocess", "moonvit", "kimi_vl_unary", "kimi_cancel", "llm")


async def recovered(system: System, traffic: Traffic, since: float) -> float:
    """Seconds from `since` until every stage is well and every good kind of request gets its right answer."""
    while time.monotonic() - since < RECOVER_WITHIN_S:
        probe = Traffic(system.http)
        async with probe:
            probe.expected = traffic.expected
            await asyncio.gather(*(probe.one(kind) for kind in traffic.expected))
        if probe.counts.ends["answered"] == len(traffic.expected) and await asyncio.to_thread(system.is_ready):
            return time.monotonic() - since
        await asyncio.sleep(0.1)
    raise SystemExit(f"no recovery: {system.health_state()} {probe.counts.errors}")


async def under_load(system: System, traffic: Traffic, name: str, fault: Callable[[], Awaitable[None]]) -> float:
    """Do `fault` while callers ask and a twentieth of them asks badly; returns seconds to recover."""
    stop = asyncio.Event()
    load = asyncio.create_task(traffic.closed_loop(CALLERS, stop, bad_share=0.05))
    await asyncio.sleep(1)
    start = time.monotonic()
    await fault()
    await asyncio.sleep(1)  # the watcher may not have noticed yet
    seconds = await recovered(system, traffic, start)
    stop.set()
    await load
    print(f"{name}: well after {seconds:.1f} s; {dict(traffic.counts.ends)}", flush=True)
    return seconds


def kill(system: System, model: str, number: signal.Signals) -> Callable[[], Awaitable[None]]:
    async def fault() -> None:
        victim = system.triton if model == "tritonserver" else system.stub(model)
        victim.send_signal(number)

    return fault


async def faults(system: System, traffic: Traffic) -> dict[str, float]:
    """Kill, freeze, vanish; seconds to recover by fault."""
    seconds = {}
    for model in (*MODELS, "tritonserver"):
        name = f"kill {model}"
        seconds[name] = await under_load(system, traffic, name, kill(system, model, signal.SIGKILL))
    for model in ("preprocess", "moonvit"):
        name = f"freeze {model}"
        seconds[name] = await under_load(system, traffic, name, kill(system, model, signal.SIGSTOP))

    async def vanish() -> None:
        await asyncio.gather(*(traffic.vanish() for _ in range(100)))

    async def slow_llm() -> None:
        for _ in range(5):
            system.stub("llm").send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.5)
            system.stub("llm").send_signal(signal.SIGCONT)
            await asyncio.sleep(0.5)

    seconds["100 callers vanish"] = await under_load(system, traffic, "100 callers vanish", vanish)
    seconds["slow llm"] = await under_load(system, traffic, "slow llm", slow_llm)
    return seconds


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
    memory = rss(system)
    async with Traffic(system.http) as traffic:
        await traffic.learn()
        start = time.monotonic()
        await traffic.open_loop(4 * best, seconds)
        goodput = traffic.counts.ends["answered"] / (time.monotonic() - start)
    ends = dict(traffic.counts.ends)
    print(f"{4 * best:.1f} requests/s offered: {goodput:.1f} answers/s, {ends}, {traffic.counts.errors.most_common(3)}")
    print(f"memory {memory / 1e6:.0f} MB before, {rss(system) / 1e6:.0f} MB after; health {system.health_state()}")
    return goodput / best, traffic.counts


def rss(system: System) -> int:
    processes = [system.triton, *system.triton.children()]
    return sum(process.memory_info().rss for process in processes if process.status() != psutil.STATUS_ZOMBIE)


async def small_shm(checkpoint: Path, folder: Path) -> tuple[float, Counts] | None:
    """64 MB of /dev/shm, in which large pictures do not fit. None where a mount of one's own is not allowed."""
    if subprocess.run([*SMALL_SHM, "true"], capture_output=True, check=False).returncode:
        print("a small /dev/shm: not done, mounting is not allowed here", flush=True)
        return None
    from tests.benchmarks import traffic as kinds

    (folder / "small").mkdir()
    system = System(checkpoint, folder / "small", LIMITS, SMALL_SHM)
    large = kinds.picture(3000, 2000, 1)
    async with Traffic(system.http) as traffic:
        await traffic.learn()
        kinds.BAD["too large for memory"] = ("kimi_vl", {"text_input": "What?", "image": [large] * 4, "max_tokens": 1})

        async def fill() -> None:
            await asyncio.gather(*(traffic.one("too large for memory") for _ in range(4)))

        try:
            seconds = await under_load(system, traffic, "/dev/shm of 64 MB is full", fill)
        finally:
            del kinds.BAD["too large for memory"]
            stop(system)
    return seconds, traffic.counts


def stop(system: System) -> None:
    system.process.terminate()
    system.process.wait(timeout=60)
    system.log.close()


async def drill(overload_s: float) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kimi-drill-"))
    checkpoint = write_tiny_checkpoint(folder / "checkpoint", "kimi_k25")
    system = System(checkpoint, folder, LIMITS)
    print(f"log in {folder}; load average {os.getloadavg()[0]:.1f} before the drill", flush=True)
    try:
        goodput_over_peak, at_overload = await overload(system, overload_s)
        async with Traffic(system.http) as traffic:
            await traffic.learn()
            seconds = await faults(system, traffic)
    finally:
        stop(system)
    counted = [at_overload, traffic.counts]
    if (small := await small_shm(checkpoint, folder)) is not None:
        seconds["small /dev/shm"] = small[0]
        counted.append(small[1])
    ends = {name: sum(counts.ends[name] for counts in counted) for name in ("answered", "refused", "lost", "wrong")}
    finish(
        faults=len(seconds) + 1,
        sent=sum(counts.sent for counts in counted),
        **ends,
        recover_s_max=round(max(seconds.values()), 1),
        goodput_over_peak=round(goodput_over_peak, 3),
        recover_s={name: round(value, 1) for name, value in seconds.items()},
        load_average=round(os.getloadavg()[0], 1),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overload-s", type=float, default=60.0)
    asyncio.run(drill(parser.parse_args().overload_s))
