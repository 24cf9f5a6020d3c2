# SPDX-License-Identifier: Apache-2.0
"""`make soak`: twenty minutes of mixed load with 5 % bad requests; memory of every process at the start and the end."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import psutil

from kimi_triton.demo.tiny import write_tiny_checkpoint
from tests.benchmarks.drill import LIMITS, stop
from tests.benchmarks.measure import finish
from tests.benchmarks.recovery import CALLERS
from tests.benchmarks.traffic import Traffic
from tests.system import System


def memory_mb(system: System) -> dict[str, int]:
    """Resident MB by model (or server); two processes of a model are added up."""
    found: dict[str, int] = {"serve": psutil.Process(system.process.pid).memory_info().rss // 1_000_000}
    for process in (system.triton, *system.triton.children()):
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        model = next((Path(word).parents[1].name for word in process.cmdline() if word.endswith("model.py")), "server")
        found[model] = found.get(model, 0) + process.memory_info().rss // 1_000_000
    return found


async def soak(minutes: float) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kimi-soak-"))
    system = System(write_tiny_checkpoint(folder / "checkpoint", "kimi_k25"), folder, LIMITS)
    try:
        async with Traffic(system.http) as traffic:
            await traffic.learn()
            ending = asyncio.Event()
            load = asyncio.create_task(traffic.closed_loop(CALLERS, ending, bad_share=0.05))
            start = time.monotonic()
            await asyncio.sleep(min(60.0, 6 * minutes))  # caches and pools fill
            first = memory_mb(system)
            while time.monotonic() - start < 60 * minutes:
                await traffic.vanish()
                await asyncio.sleep(10)
                print(f"{time.monotonic() - start:5.0f} s {dict(traffic.counts.ends)} {memory_mb(system)}", flush=True)
            ending.set()
            await load
            health = system.health_state()
            last = memory_mb(system)
    finally:
        stop(system)
    ends = {name: traffic.counts.ends[name] for name in ("answered", "refused", "lost", "wrong")}
    finish(
        faults=0,
        sent=traffic.counts.sent,
        **ends,
        recover_s_max=0.0,
        goodput_over_peak=None,
        restarts=health.get("restarts"),
        reloads=health.get("reloads"),
        memory_mb={name: [first.get(name), last.get(name)] for name in last},
        errors=dict(traffic.counts.errors.most_common(8)),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    asyncio.run(soak(parser.parse_args().minutes))
