# SPDX-License-Identifier: Apache-2.0
"""The command as a shell runs it, against a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from kimi_client import KimiClient

pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-W", "error", "-m", "kimi_client"]
LONG = ["--temperature", "0", "--repetition-penalty", "0.5", "--max-tokens", "100000"]


@pytest.fixture
def environment(live_server: Any) -> dict[str, str]:
    return os.environ | {"KIMI_URL": live_server.grpc_url}


def run(arguments: list[str], environment: dict[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, input=text, capture_output=True, text=True, timeout=60, check=False
    )


def picture(path: Path, width: int, height: int) -> str:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


def test_ask_gives_the_librarys_answer(live_server: Any, environment: dict[str, str], tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 60, 50)
    arguments = ["ask", "What?", path, "--temperature", "0", "--max-tokens", "8", "--no-thinking"]
    with KimiClient(live_server.grpc_url) as kimi:
        expected = kimi.ask("What?", [path], temperature=0, max_tokens=8, thinking=False)
    for url in (live_server.grpc_url, f"http://{live_server.http_url}"):
        streamed, whole, as_json = (
            run([*arguments, "--url", url, *more], environment) for more in ([], ["--no-stream"], ["--json"])
        )
        assert (streamed.returncode, streamed.stderr) == (0, "")
        assert streamed.stdout == whole.stdout == expected.text + "\n"
        assert json.loads(as_json.stdout)["usage"]["completion_tokens"] == expected.usage.completion_tokens


def test_health_and_an_address_without_a_server(environment: dict[str, str]) -> None:
    assert run(["health"], environment).returncode == 0
    for url in ("localhost:9", "http://localhost:9"):
        nobody = run(["health", "--url", url], environment)
        assert nobody.returncode == 3
        assert len(nobody.stderr.splitlines()) == 1


def test_embed_writes_the_librarys_rows(live_server: Any, environment: dict[str, str], tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{i}.png", 40 + 30 * i, 50) for i in range(5)]
    out = tmp_path / "x.safetensors"
    assert run(["embed", *paths, "--out", str(out), "--batch", "2"], environment).returncode == 0
    stored = load_file(out)
    with KimiClient(live_server.grpc_url) as kimi:
        for path in paths:
            assert torch.equal(stored[path].float(), torch.from_numpy(kimi.embed([path])[0].copy())), path


def test_chat_remembers_what_was_said(environment: dict[str, str], tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 60, 50)
    options = ["--temperature", "0", "--max-tokens", "6", "--no-thinking"]
    talked = run(["chat", *options], environment, f"/image {path}\nWhat?\nSure?\n/reset\nSure?\n")
    assert talked.returncode == 0, talked.stderr
    with KimiClient(environment["KIMI_URL"]) as kimi:
        said: list[str] = []
        messages: list[dict[str, Any]] = []
        turns = ([{"type": "image"}, {"type": "text", "text": "What?"}], "Sure?")
        for content in turns:
            messages.append({"role": "user", "content": content})
            said.append(kimi.chat(messages, [path], temperature=0, max_tokens=6, thinking=False).text)
            messages.append({"role": "assistant", "content": said[-1]})
        alone = kimi.chat([{"role": "user", "content": "Sure?"}], temperature=0, max_tokens=6, thinking=False).text
    assert talked.stdout == "".join(f"{text}\n" for text in [*said, alone])


def test_ctrl_c_ends_a_long_answer_with_130(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "ask", "story", *LONG, "--no-thinking"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=10)
    assert (process.returncode, complaint) == (130, b"")


def test_a_reader_that_leaves_ends_the_command(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "ask", "story", *LONG, "--no-thinking"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    started = time.monotonic()
    assert process.wait(timeout=10) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    assert time.monotonic() - started < 10
