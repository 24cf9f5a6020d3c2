# SPDX-License-Identifier: Apache-2.0
"""What the watcher does about what it sees, with everything around it made up."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_triton.errors import Unavailable
from kimi_triton.serve import watch
from kimi_triton.serve.probes import STAGES, Finding
from kimi_triton.serve.stubs import Stub
from kimi_triton.serve.watch import PROBE_EVERY_S, STEP_STUCK_S, STOPPED_S, STRIKES, Watcher

STUBS = [
    Stub(101, "preprocess", "s1"),
    Stub(102, "preprocess", "s2"),
    Stub(103, "moonvit", "s3"),
    Stub(104, "llm", "s4"),
]


class World:
    """A server, its processes and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.findings = {stage: Finding(stage, "ok") for stage in STAGES}
        self.sent: list[str] = []
        self.reloaded: list[str] = []
        self.removed: list[str] = []
        self.killed: list[int] = []
        self.reports: list[str] = []
        self.work = frozenset({"a 1"})
        self.busy_s = 5.0
        self.reload_error: Exception | None = None
        self.held = threading.Event()
        self.held.set()
        self.server = SimpleNamespace(
            process=SimpleNamespace(pid=1, returncode=None, poll=lambda: self.server.process.returncode),
            is_ready=True,
            http_url="h",
            metrics_url="m",
            admin_key="k",
            segments=SimpleNamespace(remove_named=self.removed.append),
            restart=self.restart,
        )
        self.watcher = Watcher(self.server, self.reports.append)  # type: ignore[arg-type]

    def restart(self) -> None:
        self.server.process.returncode = None
        self.dead.clear()

    def probe(self, _url: str, stage: str, _timeout_s: float) -> Finding:
        self.sent.append(stage)
        assert self.held.wait(5)
        return self.findings[stage]

    def reload(self, _url: str, header: tuple[str, str], model: str, _timeout_s: float) -> float:
        assert header[1] == "k"
        if self.reload_error:
            raise self.reload_error
        self.reloaded.append(model)
        self.dead -= {stub.pid for stub in STUBS if stub.model == model}
        return 0.5

    def pass_time(self, seconds: float) -> None:
        """Look every so often, and let what was sent come back each time."""
        for _ in range(round(seconds / 2.5)):
            self.now += 2.5
            self.watcher.look()
            self.settle()
            self.watcher.look()

    def settle(self) -> None:
        if self.held.is_set():
            probes = [sent for stage in self.watcher.stages.values() for sent in stage.probes]
            for sent in (*self.watcher._reloads.values(), *probes):
                sent.exception(5)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    world = World()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: world.now))
    monkeypatch.setattr(watch, "find_stubs", lambda _pid: list(STUBS))
    monkeypatch.setattr(watch, "is_alive", lambda pid: pid not in world.dead)
    monkeypatch.setattr(watch, "is_stopped", lambda pid: pid in world.stopped)
    monkeypatch.setattr(watch, "probe", world.probe)
    monkeypatch.setattr(watch, "reload_model", world.reload)
    monkeypatch.setattr(watch, "work_done", lambda _url, _model: world.work)
    monkeypatch.setattr(watch, "busy_seconds", lambda _pids: world.busy_s)
    monkeypatch.setattr(watch.os, "kill", lambda pid, _signal: world.killed.append(pid))
    yield world
    world.held.set()
    world.watcher.close()


def test_a_healthy_server_is_left_alone(world: World) -> None:
    world.pass_time(60)
    assert world.watcher.health()["state"] == "ok"
    assert world.reports == []
    assert world.sent.count("preprocess") == 2 * world.sent.count("moonvit")  # each of its processes is asked
    assert world.sent.count("moonvit") == pytest.approx(60 / PROBE_EVERY_S, abs=2)


def test_a_dead_process_has_its_model_loaded_again_and_its_memory_freed(world: World) -> None:
    world.pass_time(10)
    world.dead.add(103)
    world.pass_time(5)
    assert world.reloaded == ["moonvit"]
    assert world.removed == ["s3"]
    assert world.reports == [
        "loading moonvit again: its process 103 has died",
        "moonvit is loaded again after 0.0 s, 0.5 s of them to unload it",
    ]
    assert world.watcher.num_restarts == 0
    world.pass_time(10)
    assert world.watcher.health()["state"] == "ok"


def test_one_stopped_process_of_two_is_replaced_but_a_short_stop_is_waited_for(world: World) -> None:
    world.pass_time(10)
    for _ in range(3):
        world.stopped.add(102)
        world.pass_time(STOPPED_S - 0.5)
        world.stopped.clear()
        world.pass_time(2.5)
    assert world.reloaded == []
    world.stopped.add(102)
    world.pass_time(STOPPED_S + 5)
    assert world.reloaded == ["preprocess"]
    assert {101, 102} <= set(world.killed)


def test_e3_callers_of_a_dead_language_model_are_let_go_by_a_new_server(world: World) -> None:
    world.pass_time(10)
    world.dead.add(104)
    world.pass_time(5)
    assert world.watcher.num_restarts == 1
    assert world.reloaded == []
    assert world.reports[-1].startswith("the server is ready again")


def test_a_stage_named_dead_by_another_is_the_one_replaced(world: World) -> None:
    world.pass_time(10)
    world.findings["llm"] = Finding("moonvit", "ill", "Stub process", certain=True)
    world.pass_time(5)
    assert world.reloaded[:1] == ["moonvit"]


def test_errors_must_repeat_before_a_living_model_is_replaced(world: World) -> None:
    world.pass_time(10)
    world.findings["moonvit"] = Finding("moonvit", "ill", "internal error")
    world.pass_time(PROBE_EVERY_S)
    assert world.reloaded == []
    assert world.watcher.health()["state"] == "ill"
    world.pass_time(PROBE_EVERY_S * STRIKES)
    assert world.reloaded == ["moonvit"]


def test_a_busy_stage_is_never_replaced(world: World) -> None:
    world.findings["llm"] = Finding("llm", "busy", "full")
    world.pass_time(300)
    assert world.watcher.health()["state"] == "busy"
    assert world.reports == []


def test_what_is_ill_elsewhere_is_reported_and_nothing_is_replaced(world: World) -> None:
    world.findings["llm"] = Finding("llm", "ill", "no vLLM server could answer", elsewhere=True)
    world.pass_time(300)
    assert world.watcher.health()["state"] == "ill"
    assert world.reports == []
    world.findings["llm"] = Finding("llm", "ok")
    world.pass_time(10)
    assert world.watcher.health()["state"] == "ok"


def test_a_stuck_model_is_killed_and_loaded_again(world: World) -> None:
    world.pass_time(10)
    world.held.clear()
    world.pass_time(STEP_STUCK_S - PROBE_EVERY_S)
    assert world.reports == []
    world.pass_time(3 * PROBE_EVERY_S)
    deadline = time.monotonic() + 5  # another thread does it
    while not {101, 102} <= set(world.killed) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {101, 102} <= set(world.killed)
    assert "no work done" in world.reports[0]


def test_slow_answers_are_no_illness_while_work_goes_on(world: World) -> None:
    world.pass_time(10)
    world.held.clear()
    for second in range(80):
        world.work = frozenset({f"a {second}"})
        world.now += 1
        world.watcher.look()
    assert world.reports == []
    assert world.watcher.health()["state"] == "busy"


def test_stages_behind_a_loading_model_are_not_taken_for_stuck(world: World) -> None:
    world.pass_time(10)
    world.dead.add(103)
    loading = threading.Event()
    reload = world.reload
    watch.reload_model = lambda *values: loading.wait(5) and reload(*values)  # type: ignore[assignment]
    world.watcher.look()
    for _ in range(100):
        world.now += 1
        world.watcher.look()
    loading.set()
    world.pass_time(10)
    assert world.watcher.num_restarts == 0
    assert world.reloaded == ["moonvit"]


def test_one_long_piece_of_work_is_no_illness(world: World) -> None:
    world.pass_time(10)
    world.held.clear()
    for _ in range(80):
        world.busy_s += 0.5
        world.now += 1
        world.watcher.look()
    assert world.reports == []


def test_a_model_that_cannot_be_loaded_again_costs_a_restart(world: World) -> None:
    world.pass_time(10)
    world.dead.add(103)
    world.reload_error = Unavailable("load of moonvit: no")
    world.pass_time(5)
    assert world.watcher.num_restarts == 1


def test_restarts_that_do_not_help_become_rarer(world: World) -> None:
    world.pass_time(10)
    restarts = []
    for _ in range(600):
        world.server.process.returncode = 1
        world.now += 0.25
        world.watcher.look()
        if world.server.process.returncode is None:
            restarts.append(world.now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(restarts)]
    assert pauses[0] < pauses[1] < pauses[2]
    assert len(restarts) < 12
