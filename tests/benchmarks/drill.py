# SPDX-License-Identifier: Apache-2.0
"""`make drill`: everything that goes wrong in production, done to a running system under load.

Each fault must be followed by right answers without a person; no request may be lost without an answer or an error.
`--only` does some of the faults, by a part of their names.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from kimi_triton.demo.tiny import write_tiny_checkpoint
from kimi_triton.serve.ports import Ports
from tests.benchmarks import traffic as kinds
from tests.benchmarks.measure import finish
from tests.benchmarks.overload import overload
from tests.benchmarks.recovery import Fault, under_load
from tests.benchmarks.traffic import Counts, Traffic
from tests.system import System

SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
LIMITS = ("--max-waiting", "32", "--llm-max-waiting", "32")
# Rows are computed anew for each request, so that answers tell whether the workers are there.
WORKERS = ("--vision-parallel", "data", "--vision-workers", "2", "--image-cache-bytes", "0")
MODELS = ("preprocess", "moonvit", "kimi_vl_unary", "kimi_cancel", "llm")


class Drill:
    """Results of the faults so far; each system is started for the faults that it alone can show."""

    def __init__(self, only: Sequence[str]) -> None:
        self._only = only
        self.folder = Path(tempfile.mkdtemp(prefix="kimi-drill-"))
        self.checkpoint = write_tiny_checkpoint(self.folder / "checkpoint", "kimi_k25")
        self.recover_s: dict[str, float] = {}
        self.goodput_over_peak: float | None = None
        self.counts: list[Counts] = []

    def wants(self, *names: str) -> bool:
        return any(word in name for name in names for word in self._only) or not self._only

    def start(self, name: str, options: Sequence[str] = (), prefix: Sequence[str] = ()) -> System:
        (self.folder / name).mkdir()
        return System(self.checkpoint, self.folder / name, (*LIMITS, *options), prefix)

    async def overload(self, seconds: float) -> None:
        if self.wants("overload"):
            system = self.start("overload")
            try:
                self.goodput_over_peak, counts = await overload(system, seconds)
                self.counts.append(counts)
            finally:
                stop(system)

    async def do(self, system: System, faults: dict[str, Fault]) -> None:
        """Those of the faults that are wanted, one after the other; stops the system at the end."""
        try:
            async with Traffic(system.http) as traffic:
                await traffic.learn()
                for name, fault in faults.items():
                    if self.wants(name):
                        self.recover_s[name] = await under_load(system, traffic, name, fault)
                self.counts.append(traffic.counts)
        finally:
            stop(system)


def signalled(system: System, model: str, number: signal.Signals) -> Fault:
    async def fault(_: Traffic) -> psutil.Process:
        victim = system.triton if model == "tritonserver" else system.stub(model)
        victim.send_signal(number)
        return victim

    return fault


def processes(system: System) -> dict[str, Fault]:
    """Every process of the server killed, and the steps frozen."""
    kills = {f"kill {model}": signalled(system, model, signal.SIGKILL) for model in (*MODELS, "tritonserver")}
    freezes = {f"freeze {model}": signalled(system, model, signal.SIGSTOP) for model in ("preprocess", "moonvit")}
    return kills | freezes


def trouble(system: System) -> dict[str, Fault]:
    """Callers that go away and a language model that stutters."""

    async def vanish(traffic: Traffic) -> None:
        await asyncio.gather(*(traffic.vanish() for _ in range(100)))

    async def slow_llm(_: Traffic) -> None:
        for _ in range(5):
            system.stub("llm").send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.5)
            system.stub("llm").send_signal(signal.SIGCONT)
            await asyncio.sleep(0.5)

    return {"100 callers vanish": vanish, "slow llm": slow_llm}


def worker_loss(system: System) -> dict[str, Fault]:
    async def fault(_: Traffic) -> psutil.Process:
        family = psutil.Process(system.process.pid).children(recursive=True)
        victim = next(child for child in family if "kimi_triton.workers.worker" in " ".join(child.cmdline()))
        victim.kill()
        return victim

    return {"kill a vision worker": fault}


def watcher_loss(system: System) -> dict[str, Fault]:
    """The supervisor is looked after by whoever started it, as compose and Kubernetes do; here that is this program."""

    async def fault(_: Traffic) -> psutil.Process:
        victim = psutil.Process(system.process.pid)
        system.process.kill()
        system.process.wait()
        await asyncio.to_thread(system.start)
        return victim

    return {"kill serve": fault}


def fixed_ports() -> list[str]:
    """As a service has them that is started again and again."""
    ports = Ports.choose("127.0.0.1", 0, 0, 0)
    health = Ports.choose("127.0.0.1", 0, 0, 0).http
    chosen = {"http": ports.http, "grpc": ports.grpc, "metrics": ports.metrics, "health": health}
    return [word for name, port in chosen.items() for word in (f"--{name}-port", str(port))]


def full_shm() -> dict[str, Fault]:
    """64 MB of /dev/shm, in which large pictures do not fit."""
    large = [kinds.picture(3000, 2000, 1)] * 4
    kinds.BAD["too large for memory"] = ("kimi_vl", {"text_input": "What?", "image": large, "max_tokens": 1})

    async def fill(traffic: Traffic) -> None:
        await asyncio.gather(*(traffic.one("too large for memory") for _ in range(4)))
        del kinds.BAD["too large for memory"]

    return {"/dev/shm of 64 MB is full": fill}


def stop(system: System) -> None:
    system.process.terminate()
    system.process.wait(timeout=60)
    system.log.close()


async def drill(only: Sequence[str], overload_s: float) -> None:
    run = Drill(only)
    load_average = os.getloadavg()[0]
    print(f"logs in {run.folder}; load average {load_average:.1f} before the drill", flush=True)
    await run.overload(overload_s)
    if run.wants(*(f"{verb} {model}" for verb in ("kill", "freeze") for model in (*MODELS, "tritonserver"))):
        system = run.start("processes")
        await run.do(system, processes(system))
    if run.wants("100 callers vanish", "slow llm"):
        system = run.start("trouble")
        await run.do(system, trouble(system))
    if run.wants("kill a vision worker"):
        system = run.start("workers", WORKERS)
        await run.do(system, worker_loss(system))
    if run.wants("kill serve"):
        system = run.start("serve", fixed_ports())
        await run.do(system, watcher_loss(system))
    if run.wants("/dev/shm of 64 MB is full"):
        if subprocess.run([*SMALL_SHM, "true"], capture_output=True, check=False).returncode:
            print("/dev/shm of 64 MB is full: not done, mounting is not allowed here", flush=True)
        else:
            system = run.start("shm", prefix=SMALL_SHM)
            await run.do(system, full_shm())
    ends = {name: sum(counts.ends[name] for counts in run.counts) for name in ("answered", "refused", "lost", "wrong")}
    goodput = run.goodput_over_peak
    finish(
        faults=len(run.recover_s) + (goodput is not None),
        sent=sum(counts.sent for counts in run.counts),
        **ends,
        recover_s_max=round(max(run.recover_s.values(), default=0.0), 1),
        goodput_over_peak=None if goodput is None else round(goodput, 3),
        recover_s={name: round(value, 1) for name, value in run.recover_s.items()},
        load_average=[round(load_average, 1), round(os.getloadavg()[0], 1)],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="PART", help="of a fault's name; `overload` is one too"
    )
    parser.add_argument("--overload-s", type=float, default=60.0)
    values = parser.parse_args()
    asyncio.run(drill(values.only, values.overload_s))
