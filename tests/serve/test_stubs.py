# SPDX-License-Identifier: Apache-2.0
"""Stubs are found by parent and command line; a zombie counts as dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from kimi_triton.serve.stubs import Stub, busy_seconds, find_stubs, is_alive, is_stopped


def test_a_stub_is_found_with_its_model_and_segment(tmp_path: Path) -> None:
    program = tmp_path / "triton_python_backend_stub"
    program.symlink_to(sys.executable)
    script = tmp_path / "repository" / "moonvit" / "1" / "model.py"
    script.parent.mkdir(parents=True)
    script.write_text("import time; print(flush=True); time.sleep(60)")
    with subprocess.Popen([program, script, "segment_7", "1048576"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert Stub(process.pid, "moonvit", "segment_7") in find_stubs(os.getpid())
        assert find_stubs(process.pid) == []
        process.kill()


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert is_alive(process.pid)
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.returncode is None  # not collected yet, so it is a zombie
        assert not is_alive(process.pid)


def test_a_stopped_process_is_told_from_a_sleeping_one() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not is_stopped(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_stopped(process.pid)
        assert is_alive(process.pid)
        process.kill()
    assert not is_stopped(process.pid)


def test_a_computing_process_is_told_from_a_sleeping_one() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy,
        subprocess.Popen(["sleep", "60"]) as idle,
    ):
        deadline = time.monotonic() + 30
        while busy_seconds([busy.pid]) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert busy_seconds([busy.pid]) >= 0.2
        assert busy_seconds([idle.pid]) < 0.1
        busy.kill()
        idle.kill()
    assert busy_seconds([busy.pid]) == 0


def test_waiting_for_a_core_counts_too() -> None:
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", program]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as one,
        subprocess.Popen(command, stdout=subprocess.PIPE) as other,
    ):
        pids = [one.pid, other.pid]
        for process in (one, other):
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(2)
        busy = busy_seconds(pids)
        computed = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
        one.kill()
        other.kill()
    assert busy > 1.3 * computed  # each waits while the other computes
