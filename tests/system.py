# SPDX-License-Identifier: Apache-2.0
"""`kimi-triton serve` with all its processes, for tests and drills that do to it what happens in production."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

COMMAND = [str(Path(sys.executable).parent / "kimi-triton")]
BODY = {"text_input": "Hello", "max_tokens": 8, "temperature": 0, "thinking": False}


class System:
    """`kimi-triton serve` with all its processes, as a user started it."""

    def __init__(
        self, checkpoint: Path, run_folder: Path, options: Sequence[str] = (), prefix: Sequence[str] = ()
    ) -> None:
        """`prefix`: a command that runs the server in surroundings of its own."""
        ports = [word for name in ("http", "grpc", "metrics", "health") for word in (f"--{name}-port", "0")]
        self._log_file = run_folder / "serve.log"
        self.log = self._log_file.open("w")
        start = [*COMMAND, "serve", "--checkpoint", str(checkpoint), "--dtype", "float32"]
        self._command = [*prefix, *start, *ports, *options]
        self.start()

    def start(self) -> None:
        """Start it, or start it again; returns when it is ready."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        printed = ""
        for line in self.process.stdout:
            printed += line
            if "curl" in line:
                break
        self.http, self.health = (found(rf"{name}\s+(http://\S+)", printed) for name in ("HTTP", "health"))

    def printed(self) -> str:
        """What it has said about itself so far."""
        return self._log_file.read_text()

    def ask(self, model: str = "kimi_vl", timeout: float = 30) -> dict[str, Any]:
        return fetch(f"{self.http}/v2/models/{model}/generate", BODY, timeout)

    @property
    def triton(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "tritonserver" in "".join(child.cmdline()))

    def stub(self, model: str) -> psutil.Process:
        for child in self.triton.children():
            try:
                if any(part.endswith(f"/{model}/1/model.py") for part in child.cmdline()):
                    return child
            except psutil.Error:  # a zombie
                continue
        raise AssertionError(f"{model} has no process")

    def wait(self, is_done: Callable[[], object], seconds: float) -> float:
        """Seconds until `is_done()`; more are allowed on a crowded machine."""
        start = time.monotonic()
        limit = seconds * max(1.0, (os.getloadavg()[0] + 1) / (os.cpu_count() or 1))
        while not is_done():
            assert time.monotonic() - start < limit, self.health_state()
            time.sleep(0.1)
        return time.monotonic() - start

    def health_state(self) -> dict[str, Any]:
        return fetch(self.health, None, 5)

    def answers(self, expected: Any) -> bool:
        return all(self.ask(model).get("text_output") == expected for model in ("kimi_vl", "kimi_vl_unary"))

    def is_ready(self) -> bool:
        return bool(self.health_state().get("state") == "ok")


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def fetch(url: str, body: Any, timeout: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=timeout) as response:
            answer: dict[str, Any] = json.loads(response.read())
    except urllib.error.HTTPError as exc:
        answer = json.loads(exc.read() or b'{"error": "an empty answer"}')
    except (OSError, ValueError, http.client.HTTPException) as exc:
        answer = {"error": repr(exc)}
    return answer
