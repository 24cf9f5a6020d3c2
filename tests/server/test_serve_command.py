# SPDX-License-Identifier: Apache-2.0
"""`kimi-triton serve` as a user starts and stops it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kimi_triton.serve import launch
from kimi_triton.serve.ports import Ports
from tests.conftest import started

pytestmark = pytest.mark.server
COMMAND = [str(Path(sys.executable).parent / "kimi-triton")]


def command(checkpoint: Path, *more: str) -> list[str]:
    free = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    return [*COMMAND, "serve", "--checkpoint", str(checkpoint), *free, *more]


def segments(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"kimi_triton_{pid}_*"))


def read_until_ready(process: subprocess.Popen[str]) -> str:
    """Everything printed up to the curl line; returns the HTTP address."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if "curl" in line:
            address = re.search(r"HTTP\s+(http://\S+)", printed)
            assert address, printed
            return address[1]
    raise AssertionError(f"ended before it was ready: {printed}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ready_in_20_s_and_gone_in_10_s(number: signal.Signals, tiny_k25: Path) -> None:
    crowding = max(1.0, (os.getloadavg()[0] + 1) / (os.cpu_count() or 1))  # the bound is for a machine at rest
    start = time.monotonic()
    with subprocess.Popen(command(tiny_k25), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = read_until_ready(process)
        ready_s = time.monotonic() - start
        body = json.dumps({"text_input": "Hello", "max_tokens": 2}).encode()
        with urllib.request.urlopen(f"{url}/v2/models/kimi_vl/generate", body, timeout=30) as response:
            assert json.load(response)["completion_tokens"] >= 1
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        assert len(family) > 5
        assert segments(process.pid)
        start = time.monotonic()
        process.send_signal(number)
        _, progress = process.communicate(timeout=20)
        stop_s = time.monotonic() - start
    assert process.returncode == 0
    assert [pid for pid in family if psutil.pid_exists(pid)] == []
    assert segments(process.pid) == []
    assert "loading moonvit" in progress
    assert "loading llm" in progress
    assert ready_s < 20 * crowding
    assert stop_s < 10


def test_ctrl_c_during_the_start_leaves_nothing(tiny_k25: Path) -> None:
    with subprocess.Popen(command(tiny_k25), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 20
        while not segments(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert segments(process.pid) == []
    assert process.returncode == 130


@pytest.mark.parametrize("damage", ["config", "shard", "tokenizer", "processor", "nothing there"])
def test_a_wrong_checkpoint_is_one_sentence_before_any_port_opens(damage: str, tiny_k25: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    if damage != "nothing there":
        shutil.copytree(tiny_k25, folder)
    if damage == "config":
        (folder / "config.json").write_text('{"model_type": "other"}')
    elif damage == "shard":
        next(folder.glob("*.safetensors")).unlink()
    elif damage == "tokenizer":
        (folder / "tiktoken.model").write_text("not a rank file\n")
    elif damage == "processor":
        (folder / "preprocessor_config.json").unlink()
    start = time.monotonic()
    result = subprocess.run(command(folder), capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("kimi-triton: ")
    assert "HTTP" not in result.stdout
    assert time.monotonic() - start < 10


def test_a_port_in_use_is_named(tiny_k25: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        more = ["--http-port", str(port)]
        result = subprocess.run(command(tiny_k25, *more), capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert f"http port {port}" in result.stderr


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_port_taken_during_the_start_is_replaced(
    name: str, tiny_k25: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    choose = Ports.choose
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", 0))

        def choose_and_lose_one(*values: Any) -> Ports:
            ports = choose(*values)
            if not chosen:
                taker.listen()
                ports = replace(ports, **{name: taker.getsockname()[1]})
            chosen.append(ports)
            return ports

        monkeypatch.setattr(launch, "Ports", SimpleNamespace(choose=choose_and_lose_one))
        with started(tiny_k25, tmp_path) as server:
            body = json.dumps({"text_input": "Hello", "max_tokens": 2}).encode()
            url = f"http://{server.http_url}/v2/models/kimi_vl_unary/generate"  # which asks the server's own gRPC port
            with urllib.request.urlopen(url, body, timeout=30) as response:
                assert json.load(response)["completion_tokens"] >= 1
    assert len(chosen) == 2


def test_a_written_repository_serves_under_plain_options(tiny_k25: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "write-repository", str(tmp_path / "repository"), "--checkpoint", str(tiny_k25)],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert str(tmp_path / "repository") in result.stdout
    assert (tmp_path / "repository" / "kimi_vl" / "config.pbtxt").is_file()
    assert (tmp_path / "repository" / "llm" / "1" / "model.py").is_file()
