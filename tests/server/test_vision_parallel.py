# SPDX-License-Identifier: Apache-2.0
"""The three ways to run the vision tower, each in a real server: same answers, real parallelism, losses survived."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from kimi_client.load.perf_analyzer import find_perf_analyzer
from kimi_triton.serve.cli import main
from tests.conftest import LiveServer, started
from tests.server.conftest import Caller

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

MODES: dict[str, dict[str, Any]] = {
    "instances": {"vision_instances": 2, "image_cache_bytes": 0},
    "data": {"vision_parallel": "data", "vision_workers": 2},
    "tensor": {"vision_parallel": "tensor", "vision_workers": 2},
}
LARGE = (1, 80, 80)  # patches whose attention takes one thread a while


class Mode:
    """A running server in one of the modes."""

    def __init__(self, name: str, server: LiveServer) -> None:
        self.name, self.server = name, server
        self.caller = Caller(server.http_url, server.grpc_url)

    def metric(self, name: str) -> dict[str, float]:
        """Values by instance."""
        with urllib.request.urlopen(f"http://{self.server.metrics_url}/metrics", timeout=10) as response:
            text = response.read().decode()
        found = re.findall(rf'^kimi_vision_{name}{{instance="(\w+)",model="moonvit"}} (\S+)$', text, re.MULTILINE)
        return {instance: float(value) for instance, value in found}

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.server.pid).children(recursive=True)
        return [child for child in children if "kimi_triton.workers.worker" in " ".join(child.cmdline())]

    def encode_random(self, seed: int, grid: tuple[int, int, int] = LARGE) -> np.ndarray[Any, Any]:
        """Rows of one image, straight from moonvit."""
        pixels = np.random.default_rng(seed).integers(256, size=(1, np.prod(grid), 3, 14, 14), dtype=np.uint8)
        digest = np.full((1, 1, 32), seed, np.uint8)
        tensors = (("pixel_values", pixels, "UINT8"), ("image_grid_thw", np.array([[grid]]), "INT64"))
        inputs = [
            grpcclient.InferInput(name, list(array.shape), kind).set_data_from_numpy(array)
            for name, array, kind in (*tensors, ("image_digest", digest, "UINT8"))
        ]
        with grpcclient.InferenceServerClient(self.server.grpc_url) as client:
            rows: np.ndarray[Any, Any] = client.infer("moonvit", inputs).as_numpy("image_embeds")[0]
        return rows


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest, tiny_k25: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mode]:
    options = {"vision_threads": 1, "vision_stall_timeout_s": 30, "start_timeout_s": 300.0, **MODES[request.param]}
    with started(tiny_k25, tmp_path_factory.mktemp(request.param), **options) as server:
        yield Mode(request.param, server)


def seconds(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def test_every_mode_answers_like_one_process(mode: Mode, caller: Caller, png: Any) -> None:
    images = [png(width, height) for width, height in ((56, 84), (300, 40), (200, 200), (28, 28), (130, 70))]
    rows, grids = mode.caller.embed(images)
    expected_rows, expected_grids = caller.embed(images)
    assert grids.tolist() == expected_grids.tolist()
    np.testing.assert_allclose(rows, expected_rows, rtol=0.02, atol=0.02)  # one step of bf16
    for count in (0, 1, 5):
        options = {"max_tokens": 8, "temperature": 0}
        answer = mode.caller.unary("What is this?", images[:count] or None, **options)
        assert answer == caller.unary("What is this?", images[:count] or None, **options) | {
            "cached_images": answer["cached_images"]
        }


def test_many_callers_at_once_get_their_own_rows(mode: Mode) -> None:
    grids = [(1, 2, 2), (1, 6, 8), (1, 20, 4), (4, 4, 4)]
    requests = [(seed, grids[seed % len(grids)]) for seed in range(24)]
    alone = [mode.encode_random(*request) for request in requests]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda request: mode.encode_random(*request), requests * 3))
    for rows, expected in zip(together, alone * 3, strict=True):
        np.testing.assert_allclose(rows, expected, rtol=0.02, atol=0.02)


def test_metrics_tell_who_worked(mode: Mode) -> None:
    before = sum(mode.metric("images").values())
    for seed in range(100, 104):
        mode.encode_random(seed, (1, 4, 4))
    assert sum(mode.metric("images").values()) == before + 4
    assert (
        set(mode.metric("images"))
        == {
            "instances": {"moonvit_0_0", "moonvit_0_1"},
            "data": {"moonvit_0_0"},
            "tensor": {"moonvit_0_0"},
        }[mode.name]
    )
    assert sum(mode.metric("forward_patches_count").values()) >= 4
    assert sum(mode.metric("encode_ms_sum").values()) > 0
    assert sum(mode.metric("cache_misses").values()) >= 4


def test_two_requests_at_once_take_less_time_than_one_after_the_other(mode: Mode) -> None:
    """Two cores, one thread in each process. The best of some rounds, because the machine has other things to do."""
    if mode.name == "tensor":
        pytest.skip("both workers are at work on each request")
    seeds = iter(range(200, 256))
    mode.encode_random(next(seeds))
    shares = []
    for _ in range(5):
        one_by_one = sum(seconds(lambda: mode.encode_random(next(seeds))) for _ in range(2))
        pair = [threading.Thread(target=mode.encode_random, args=(next(seeds),)) for _ in range(2)]
        shares.append(seconds(lambda pair=pair: [thread.start() for thread in pair] and [one.join() for one in pair]))
        shares[-1] /= one_by_one
        if shares[-1] < 0.75:
            return
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"the machine is too busy to tell, shares of the time were {shares}")
    pytest.fail(f"both together took {min(shares):.2f} of the time of one after the other")


def test_perf_analyzer_runs_against_the_vision_step(mode: Mode, tmp_path: Path) -> None:
    analyzer = find_perf_analyzer()
    data = {
        "pixel_values": {"content": [128] * (4 * 3 * 14 * 14), "shape": [4, 3, 14, 14]},
        "image_grid_thw": {"content": [1, 2, 2], "shape": [1, 3]},
        "image_digest": {"content": [7] * 32, "shape": [1, 32]},
        "received_s": {"content": [0.0], "shape": [1]},
    }
    (tmp_path / "input.json").write_text(json.dumps({"data": [data]}))
    command = f"-m moonvit -i grpc -u {mode.server.grpc_url} --input-data {tmp_path / 'input.json'}"
    command += " --concurrency-range 4 --request-count 40"
    result = subprocess.run(
        [analyzer.path, *command.split()], env=analyzer.environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"Throughput: [1-9]", result.stdout), result.stdout


def test_e3_a_lost_worker_fails_its_requests_only_and_the_next_succeeds(mode: Mode) -> None:
    if mode.name == "instances":
        assert mode.workers() == []
        return
    victim = mode.workers()[0]
    victim.suspend()  # its request cannot be done before it is killed
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(mode.encode_random, seed, (1, 4, 4)) for seed in (151, 152)]
        time.sleep(0.5)
        os.kill(victim.pid, signal.SIGKILL)
        errors = [answer.exception(timeout=60) for answer in answers]
    lost = [error for error in errors if error is not None]
    assert lost
    for error in lost:
        assert isinstance(error, InferenceServerException)
        assert error.status() == "StatusCode.UNAVAILABLE"
        assert "ended (SIGKILL)" in error.message()
    assert len(mode.encode_random(153, (1, 4, 4))) == 4
    deadline = time.monotonic() + 120
    while len(mode.workers()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    mode.encode_random(154, (1, 4, 4))
    assert sum(mode.metric("worker_restarts").values()) == 1
    assert not [child for child in psutil.Process(mode.server.pid).children(True) if child.pid == victim.pid]


def test_e2_heads_that_do_not_divide_are_refused_before_a_port_opens(
    tiny_k25: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--checkpoint", str(tiny_k25), "--vision-parallel", "tensor", "--vision-workers", "3"]
    assert main(arguments) == 1
    assert "4 attention heads of the vision tower do not divide over 3 tensor workers" in capsys.readouterr().err
