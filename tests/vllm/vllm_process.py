# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server, started with the command that `kimi-triton llm-command` prints."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from kimi_triton.llm.vllm_command import VllmCommand

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
START_TIMEOUT_S = 600.0
# Eager mode turns on kernels of vLLM's own. The CPU one for plain rotary positions takes the heads of MLA for tokens
# (`forward_cpu` and `forward_native` of its RotaryEmbedding differ by several units), so torch's form is used instead.
EAGER = ("--enforce-eager", "--compilation-config", json.dumps({"custom_ops": ["all", "-rotary_embedding"]}))
# For a small machine: one thread that may run anywhere, a small cache, no compilation.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class VllmProcess:
    """`start` returns when the server is ready; it may be started again after `kill`, at the same address."""

    def __init__(self, checkpoint: Path, log_file: Path, *more: str, max_model_len: int = 1024) -> None:
        if not PYTHON.exists():
            raise FileNotFoundError(f"{PYTHON} is missing; run `make vllm-env`")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = VllmCommand(checkpoint=checkpoint, max_model_len=max_model_len, host="127.0.0.1", port=port)
        (line,) = command.lines()
        _vllm, _serve, folder, *options = shlex.split(line)
        # The CPU build lacks the `vllm` script; its module takes the same options.
        module = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        self._command = [*module, *options, "--dtype", "bfloat16", *EAGER, *more]
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> VllmProcess:
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        process = self._process
        while not self._is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(self._log_file.read_text(errors="replace")[-3000:])
            time.sleep(0.5)
        self._warm_up()
        return self

    def kill(self) -> None:
        """SIGKILL to the server and all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def num_running(self) -> float:
        """Requests that vLLM works on, by its own metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(names))

    def _warm_up(self) -> None:
        """The first pass of the CPU build takes up to a minute on a busy machine."""
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=START_TIMEOUT_S).close()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False
