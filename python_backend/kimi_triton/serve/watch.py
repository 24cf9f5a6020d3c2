# SPDX-License-Identifier: Apache-2.0
"""Look after a running server: notice what is dead or stuck, replace it, and say how each stage is.

Triton goes on calling a model ready whose process has died. A model that answers within `execute` is unloaded and
loaded again; its callers got an error by then. The callers of one that answers later would wait for ever, because
Triton keeps their requests, so for those the whole server is started again, which ends their connections.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from kimi_triton.serve.admin import reload_model, work_done
from kimi_triton.serve.probes import STAGES, Finding, State, probe
from kimi_triton.serve.server import ADMIN_HEADER, TritonServer
from kimi_triton.serve.stubs import Stub, busy_seconds, find_stubs, is_alive, is_stopped

PROBE_EVERY_S = 5.0
STUCK_S = 20.0  # without an answer and without any work done
STEP_STUCK_S = 12.0  # the same for steps whose work is short; they compute all the time they need
STOPPED_S = 3.0  # by a signal; of several processes of one stage the others go on answering
BUSY_SHARE = 0.1  # of a core; a process that computes or waits for a core so much has a long piece of work
STRIKES = 3  # errors in a row of a stage whose process lives
LOAD_TIMEOUT_S = 900.0
SETTLED_S = 60.0  # after so long without trouble the next trouble counts as the first
ANSWER_LATER = ("llm", "kimi_vl_unary")


@dataclass(slots=True)
class Stage:
    """What is known about one stage."""

    state: State = "loading"
    detail: str = ""
    strikes: int = 0
    probes: list[Future[Finding]] = field(default_factory=list)
    probed_at: float = 0.0
    work_at_probe: frozenset[str] = frozenset()
    busy_s_at_probe: float = 0.0


class Watcher:
    """Looks after one server; `look` is called often, always from the thread that started the server."""

    def __init__(self, server: TritonServer, report: Callable[[str], None]) -> None:
        self._server = server
        self._report = report
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="watch")
        self._lock = threading.Lock()
        self._reloads: dict[str, Future[str]] = {}  # model -> what to report
        self._troubles: list[float] = []
        self._starting = True
        self._started_at = time.monotonic()
        self._start_not_before = 0.0
        self.stages = {name: Stage() for name in STAGES}
        self.num_restarts = self.num_reloads = 0
        self._stubs: list[Stub] = []
        self._stopped_since: dict[int, float] = {}  # by pid

    def look(self) -> None:
        """One look; starts what has to be done about what it sees and does not wait for it."""
        if self._server.process.poll() is not None:
            self._restart(f"the server ended with code {self._server.process.returncode}")
        elif self._starting:
            self._look_at_start()
        else:
            self._look_at_processes()
            self._look_at_reloads()
            for name, stage in self.stages.items():
                if not self._reloads:  # while a model is loading, those behind it cannot do well
                    self._look_at_stage(name, stage)

    def health(self) -> dict[str, object]:
        """JSON of all stages; may be called from any thread."""
        with self._lock:
            states = {name: {"state": stage.state, "detail": stage.detail} for name, stage in self.stages.items()}
            worst = max((stage.state for stage in self.stages.values()), key=["ok", "busy", "loading", "ill"].index)
        return {
            "state": worst,
            "stages": states,
            "restarts": self.num_restarts,
            "reloads": self.num_reloads,
        }

    def close(self) -> None:
        """Wait for nothing: what is under way ends with the server."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look_at_start(self) -> None:
        if self._server.is_ready:
            self._starting = False
            if self.num_restarts:
                self._report(f"the server is ready again after {time.monotonic() - self._started_at:.1f} s")
            self._stubs = find_stubs(self._server.process.pid)

    def _look_at_processes(self) -> None:
        for stub in self._stubs:
            if not is_alive(stub.pid):
                self._heal(stub.model, f"its process {stub.pid} has died")
                break  # the list has changed
            if self._stopped_s(stub.pid) > STOPPED_S:
                self._heal(stub.model, f"its process {stub.pid} has been stopped")
                break

    def _stopped_s(self, pid: int) -> float:
        """Seconds since a process was first seen to be stopped; 0 while it runs."""
        if not is_stopped(pid):
            self._stopped_since.pop(pid, None)
            return 0.0
        return time.monotonic() - self._stopped_since.setdefault(pid, time.monotonic())

    def _look_at_reloads(self) -> None:
        for model, reloading in list(self._reloads.items()):
            if not reloading.done():
                continue
            del self._reloads[model]
            self._stubs = find_stubs(self._server.process.pid)
            self._forget_probes()
            if error := reloading.exception():
                self._restart(str(error))
                break
            self._report(reloading.result())

    def _look_at_stage(self, name: str, stage: Stage) -> None:
        """Send probes when it is time, and weigh those that came back."""
        if not stage.probes:
            if time.monotonic() - stage.probed_at >= PROBE_EVERY_S:
                self._send_probes(name, stage)
        elif all(sent.done() for sent in stage.probes):
            findings, stage.probes = [sent.result() for sent in stage.probes], []
            self._weigh(name, stage, max(findings, key=lambda finding: (finding.state == "ill", finding.certain)))
        elif time.monotonic() - stage.probed_at > (stuck_s := STUCK_S if name in ANSWER_LATER else STEP_STUCK_S):
            stage.probes = []
            if not self._works(name, stage):
                self._heal(name, f"no answer and no work done in {stuck_s:.0f} s")
            else:
                self._set(name, "busy", f"no answer to a probe in {stuck_s:.0f} s, but work goes on")

    def _send_probes(self, name: str, stage: Stage) -> None:
        """As many at once as there are processes, so that each of them gets one if they are idle."""
        stage.probed_at = time.monotonic()
        stage.work_at_probe = work_done(self._server.metrics_url, name)
        stage.busy_s_at_probe = self._busy_s(name)
        num_instances = max(1, sum(stub.model == name for stub in self._stubs))
        stage.probes = [
            self._pool.submit(probe, self._server.http_url, name, STUCK_S + PROBE_EVERY_S) for _ in range(num_instances)
        ]

    def _works(self, name: str, stage: Stage) -> bool:
        """Whether something was done since the probe was sent, although it was not answered."""
        busy_s = self._busy_s(name) - stage.busy_s_at_probe
        is_computing = busy_s > BUSY_SHARE * (time.monotonic() - stage.probed_at)
        return is_computing or work_done(self._server.metrics_url, name) != stage.work_at_probe

    def _busy_s(self, name: str) -> float:
        return busy_seconds(stub.pid for stub in self._stubs if stub.model == name)

    def _weigh(self, name: str, stage: Stage, finding: Finding) -> None:
        self._set(name, finding.state, finding.detail)
        if finding.state != "ill" or finding.elsewhere:
            stage.strikes = 0
            return
        stage.strikes += 1
        if finding.certain or stage.strikes >= STRIKES:
            self._heal(finding.stage, finding.detail)  # which may be an earlier one that this one waits for

    def _heal(self, model: str, why: str) -> None:
        if model in self._reloads:
            return
        if model in ANSWER_LATER:
            self._restart(f"{model}: {why}")
        else:
            self._replace(model, why)

    def _replace(self, model: str, why: str) -> None:
        self._report(f"loading {model} again: {why}")
        self.num_reloads += 1
        if model in self.stages:
            self.stages[model].strikes = 0
            self._set(model, "loading", why)
        old = [stub for stub in self._stubs if stub.model == model]
        self._stubs = [stub for stub in self._stubs if stub.model != model]
        self._reloads[model] = self._pool.submit(self._reload, model, old)

    def _reload(self, model: str, old: list[Stub]) -> str:
        for stub in old:
            with suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)  # a stuck one would keep the unloading waiting
        header = (ADMIN_HEADER, self._server.admin_key)
        start = time.monotonic()
        unload_s = reload_model(self._server.http_url, header, model, LOAD_TIMEOUT_S)
        for stub in old:
            self._server.segments.remove_named(stub.segment)
        return f"{model} is loaded again after {time.monotonic() - start:.1f} s, {unload_s:.1f} s of them to unload it"

    def _restart(self, why: str) -> None:
        """At once the first time, then after growing pauses."""
        now = time.monotonic()
        if now < self._start_not_before:
            return
        self._troubles = [moment for moment in self._troubles if now - moment < SETTLED_S] + [now]
        self._start_not_before = now + 2.0 ** len(self._troubles)
        self.num_restarts += 1
        self._report(f"starting the server again: {why}")
        self._forget_probes()
        for name in self.stages:
            self._set(name, "loading", why)
        self._reloads.clear()
        self._server.restart()
        self._starting, self._started_at = True, now

    def _forget_probes(self) -> None:
        """Those that are under way tell of a time that is over."""
        for stage in self.stages.values():
            stage.probes, stage.strikes, stage.probed_at = [], 0, 0.0

    def _set(self, name: str, state: State, detail: str) -> None:
        with self._lock:
            self.stages[name].state, self.stages[name].detail = state, detail
