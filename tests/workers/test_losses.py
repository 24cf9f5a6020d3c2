# SPDX-License-Identifier: Apache-2.0
"""Workers that die, stall or are left alone: requests end in time, the next one succeeds, nothing stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from kimi_triton.errors import ConfigError, Unavailable
from kimi_triton.vision.grids import Grid
from kimi_triton.vision.layout import Parallel
from kimi_triton.workers.pool import WorkerPool
from tests.workers.conftest import pids, process_state, random_images, started_pool, vision_options

SMALL: list[Grid] = [(1, 2, 2)] * 4
KILLS = 20

# Starts a pool in the mode of argv[2], says which processes there are, and never ends by itself.
ORPHAN_MAKER = """
import sys, time
from pathlib import Path
from tests.workers.conftest import pids, started_pool, vision_options
with started_pool(vision_options(Path(sys.argv[1]), sys.argv[2], 2)) as pool:
    print(*pids(pool), flush=True)
    time.sleep(600)
"""


def encode(pool: WorkerPool, grids: list[Grid]) -> list[Tensor | Exception]:
    return list(pool.encode(random_images(grids), grids))


def all_rows(results: list[Tensor | Exception]) -> bool:
    return all(isinstance(rows, Tensor) for rows in results)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)


def children_of_this_process() -> set[int]:
    """Processes started by this one, zombies included."""
    with subprocess.Popen(["ps", "--ppid", str(os.getpid()), "-o", "pid="], stdout=subprocess.PIPE, text=True) as ps:
        return {int(pid) for pid in ps.communicate()[0].split()} - {ps.pid}


@pytest.fixture
def _no_child_is_left() -> Iterator[None]:
    """A test leaves no worker; servers that other tests share may run beside it."""
    before = children_of_this_process()
    yield
    assert children_of_this_process() <= before


@pytest.mark.usefixtures("_no_child_is_left")
@pytest.mark.parametrize("parallel", ["data", "tensor"])
def test_e3_a_worker_killed_at_work_fails_its_images_only_and_is_replaced(tiny_k25: Path, parallel: Parallel) -> None:
    with started_pool(vision_options(tiny_k25, parallel, 2)) as pool, ThreadPoolExecutor(1) as thread:
        first_pids = pids(pool)
        os.kill(first_pids[1], signal.SIGSTOP)  # so that it cannot be done before it is killed
        answer = thread.submit(encode, pool, SMALL)
        time.sleep(0.3)
        os.kill(first_pids[1], signal.SIGKILL)
        results = answer.result(timeout=30)
        lost = [result for result in results if isinstance(result, Unavailable)]
        assert len(lost) == (len(SMALL) if parallel == "tensor" else len(SMALL) // 2)
        assert "ended (SIGKILL)" in str(lost[0])
        assert all_rows(encode(pool, SMALL))
        wait_until(lambda: all(group.is_ready for group in pool.groups), 150)
        assert pool.num_restarts == 1
        survivors = set(first_pids) & set(pids(pool))
        assert survivors == (set() if parallel == "tensor" else {first_pids[0]})
        assert [process_state(pid) for pid in set(first_pids) - survivors] == [None] * (2 - len(survivors))


@pytest.mark.parametrize("parallel", ["data", "tensor"])
def test_e3_a_worker_that_stands_still_is_given_up_in_the_configured_time(tiny_k25: Path, parallel: Parallel) -> None:
    options = replace(vision_options(tiny_k25, parallel, 2), stall_timeout_s=1.5)
    with started_pool(options) as pool:
        os.kill(pids(pool)[1], signal.SIGSTOP)
        start = time.monotonic()
        results = encode(pool, SMALL)
        assert 1.0 < time.monotonic() - start < 30
        assert "made no progress for 1.5 s" in " ".join(map(str, results))
        assert all_rows(encode(pool, SMALL))


def test_a_worker_killed_while_idle_costs_no_request(tiny_k25: Path) -> None:
    with started_pool(vision_options(tiny_k25, "tensor", 2)) as pool:
        for place in range(2):  # both are replaced each time, so the ids are asked for anew
            restarts = pool.num_restarts
            os.kill(pids(pool)[place], signal.SIGKILL)
            wait_until(lambda before=restarts: pool.num_restarts > before, 150)
            assert all_rows(encode(pool, SMALL))


@pytest.mark.usefixtures("_no_child_is_left")
def test_e3_every_request_ends_while_workers_are_killed_20_times(tiny_k25: Path) -> None:
    generator = random.Random(0)
    ended: list[bool] = []
    with started_pool(vision_options(tiny_k25, "data", 2)) as pool:
        is_over = threading.Event()
        started = 0

        def ask_again_and_again() -> None:
            nonlocal started
            while not is_over.is_set():
                started += 1
                results = encode(pool, [(1, 20, 20)] * 6)
                assert all(isinstance(result, Tensor | Unavailable) for result in results), results
                ended.append(all_rows(results))

        asker = threading.Thread(target=ask_again_and_again)
        asker.start()
        for _ in range(KILLS):
            wait_until(lambda: any(group.is_ready for group in pool.groups), 150)
            time.sleep(generator.uniform(0, 0.1))
            ready = [pid for group in pool.groups if group.is_ready for pid in group.pids]
            restarts = pool.num_restarts
            os.kill(generator.choice(ready), signal.SIGKILL)
            wait_until(lambda before=restarts: pool.num_restarts > before, 150)
        is_over.set()
        asker.join(150)
        assert not asker.is_alive()
        assert len(ended) == started
        assert pool.num_restarts == KILLS
        wait_until(lambda: all(group.is_ready for group in pool.groups), 150)
        assert all_rows(encode(pool, SMALL))
        assert True in ended
        assert False in ended


@pytest.mark.parametrize("parallel", ["data", "tensor"])
def test_workers_do_not_outlive_a_killed_parent(tiny_k25: Path, parallel: Parallel) -> None:
    command = [sys.executable, "-c", ORPHAN_MAKER, str(tiny_k25), parallel]
    parent = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    wait_until(lambda: all(process_state(pid) in (None, "Z") for pid in workers), 10)


def test_a_stop_ends_what_is_at_work(tiny_k25: Path) -> None:
    with started_pool(vision_options(tiny_k25, "data", 1)) as pool, ThreadPoolExecutor(1) as thread:
        os.kill(pids(pool)[0], signal.SIGSTOP)
        answer = thread.submit(encode, pool, SMALL)
        time.sleep(0.3)
        pool.stop()
        assert all(isinstance(result, Unavailable) for result in answer.result(timeout=10))
        assert all(isinstance(result, Unavailable) for result in encode(pool, SMALL))


@pytest.mark.usefixtures("_no_child_is_left")
def test_a_start_that_takes_too_long_is_given_up(tiny_k25: Path) -> None:
    options = replace(vision_options(tiny_k25, "data", 2), start_timeout_s=0.05)
    with pytest.raises(ConfigError, match=r"was not ready after 0\.05 s"), started_pool(options):
        pytest.fail("it started")


@pytest.mark.usefixtures("_no_child_is_left")
def test_a_start_that_fails_says_why(tiny_k25: Path) -> None:
    options = replace(vision_options(tiny_k25, "data", 2), dtype="float16")
    with pytest.raises(ConfigError, match="dtype is 'float16'"), started_pool(options):
        pytest.fail("it started")
