# SPDX-License-Identifier: Apache-2.0
"""Any process of a running system may be killed or stopped: right answers come back without a person."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kimi_triton.serve.segments import remove_abandoned
from tests.system import BODY, COMMAND, System, fetch

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
SHM = Path("/dev/shm")


def count_of_repairs(health: dict[str, Any]) -> int:
    return int(health.get("restarts", 0) + health.get("reloads", 0))


@pytest.fixture(scope="module")
def system(tiny_k25: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    running = System(tiny_k25, tmp_path_factory.mktemp("healing"))
    with running.process, running.log:
        yield running
        running.process.terminate()


@pytest.fixture(scope="module")
def expected(system: System) -> Any:
    answer = system.ask()
    assert "text_output" in answer, answer
    system.wait(system.is_ready, 20)
    return answer["text_output"]


@pytest.mark.parametrize("model", ["preprocess", "moonvit", "kimi_vl_unary", "kimi_cancel"])
def test_e3_a_killed_step_comes_back(model: str, system: System, expected: Any) -> None:
    before = system.health_state()
    system.stub(model).kill()
    system.wait(lambda: count_of_repairs(system.health_state()) > count_of_repairs(before), 5)
    system.wait(lambda: system.answers(expected) and system.is_ready(), 30)


def test_e3_a_frozen_step_comes_back(system: System, expected: Any) -> None:
    system.stub("moonvit").send_signal(signal.SIGSTOP)
    assert "error" in system.ask()
    system.wait(lambda: system.answers(expected) and system.is_ready(), 30)


def test_e3_callers_of_a_killed_language_model_get_an_error_soon(system: System, expected: Any) -> None:
    answers: list[Any] = []
    llm = system.stub("llm")
    llm.send_signal(signal.SIGSTOP)  # so that the request is there, unanswered, when the process is killed
    url = f"{system.http}/v2/models/kimi_vl/generate"
    caller = threading.Thread(target=lambda: answers.append(fetch(url, BODY, 120)))
    caller.start()
    time.sleep(0.3)
    llm.kill()
    caller.join(timeout=30)
    assert answers, "the caller still waits"
    system.wait(lambda: system.answers(expected) and system.is_ready(), 30)


def test_a_killed_server_comes_back(system: System, expected: Any) -> None:
    system.triton.kill()
    assert system.health_state()["state"] in ("loading", "ok")
    system.wait(lambda: system.answers(expected) and system.is_ready(), 30)


def test_the_repository_api_is_closed_to_others(system: System, expected: Any) -> None:
    for action in ("unload", "load"):
        assert "restricted" in str(fetch(f"{system.http}/v2/repository/models/llm/{action}", {}, 5))
    assert "restricted" in str(fetch(f"{system.http}/v2/trace/setting", {}, 5))
    assert system.answers(expected)


def test_health_command_tells_the_ill_stage(system: System, expected: Any) -> None:
    assert system.answers(expected)
    port = system.http.rsplit(":", 1)[1]
    command = [*COMMAND, "health", "--http-port", port]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout
    assert set(json.loads(result.stdout)["stages"]) == {"preprocess", "moonvit", "llm", "kimi_vl_unary"}
    result = subprocess.run([*COMMAND, "health", "--http-port", "1"], capture_output=True, text=True, check=False)
    assert result.returncode == 1


def test_everything_ends_with_a_killed_supervisor_and_the_next_start_cleans_up(system: System) -> None:
    family = psutil.Process(system.process.pid).children(recursive=True)
    prefix = f"kimi_triton_{system.process.pid}_"
    assert list(SHM.glob(f"{prefix}*"))
    system.process.kill()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []
    remove_abandoned()
    assert list(SHM.glob(f"{prefix}*")) == []
