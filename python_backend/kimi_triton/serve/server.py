# SPDX-License-Identifier: Apache-2.0
"""One Triton server process: start, wait until every model is ready, stop, leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kimi_triton.errors import ConfigError
from kimi_triton.progress import parse_progress
from kimi_triton.serve.installation import ServerInstallation

EXIT_TIMEOUT_S = 5  # Triton lets requests finish for so long
KILL_AFTER_S = EXIT_TIMEOUT_S + 2.5
SHM = Path("/dev/shm")
LOAD_ERROR = re.compile(r"failed to load '(\w+)' version \d+: (.+)")


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of one server."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def choose(cls, host: str, http: int, grpc: int, metrics: int) -> Ports:
        """Ports as asked for; 0 becomes a free one. Raises ConfigError when one is taken."""
        sockets = [_bound(host, name, port) for name, port in (("http", http), ("gRPC", grpc), ("metrics", metrics))]
        ports = [listener.getsockname()[1] for listener in sockets]
        for listener in sockets:
            listener.close()
        return cls(*ports)


def _bound(host: str, name: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise ConfigError(f"{name} port {port} on {host} cannot be used: {exc.strerror}") from exc
    return listener


class TritonServer:
    """A started server. `stop` (or leaving the `with` block) ends it and frees its shared memory."""

    def __init__(
        self, installation: ServerInstallation, repository: Path, host: str, ports: Ports, log_file: Path
    ) -> None:
        self.host, self.ports = host, ports
        self._shm_prefix = f"kimi_triton_{os.getpid()}_{ports.http}_"
        self._recent: deque[str] = deque(maxlen=200)
        self._on_progress: Callable[[str, float], None] | None = None
        self._log = log_file.open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            self._command(installation, repository),
            env=_environment(installation),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_log, name="triton-log", daemon=True)
        self._reader.start()

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        return f"{self.host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"{self.host}:{self.ports.metrics}"

    def wait_ready(
        self,
        timeout_s: float,
        on_progress: Callable[[str, float], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Block until every model is ready or `is_stopped`. Raises ConfigError with the server's reason otherwise."""
        self._on_progress = on_progress
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                self._reader.join(timeout=2)
                raise ConfigError(self._reason())
            if is_stopped() or _is_ready(self.http_url):
                return
            time.sleep(0.1)
        raise ConfigError(f"the server was not ready after {timeout_s:.0f} s; {self._reason()}")

    def stop(self) -> None:
        """End the server and everything it started, within KILL_AFTER_S and a little."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with contextlib.suppress(ProcessLookupError):  # stubs that outlived the server share its session
            os.killpg(self.process.pid, signal.SIGKILL)
        self._reader.join(timeout=2)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
        for segment in SHM.glob(f"{self._shm_prefix}*"):
            segment.unlink(missing_ok=True)

    def _command(self, installation: ServerInstallation, repository: Path) -> list[str]:
        command = [
            str(installation.binary),
            f"--model-repository={repository}",
            f"--http-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            "--disable-auto-complete-config",  # the files are complete, and asking each model would import it twice
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
        ]
        if installation.backend_directory is not None:
            command.append(f"--backend-directory={installation.backend_directory}")
        return command

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            progress = parse_progress(line)
            if progress is not None:
                if self._on_progress is not None:
                    self._on_progress(*progress)
                continue
            self._recent.append(line)
            self._log.write(line)
            self._log.flush()

    def _reason(self) -> str:
        """The first load error of the log, else its last lines."""
        for line in self._recent:
            if match := LOAD_ERROR.search(line):
                cause = match[2].split("\\n\\nAt:")[0].removeprefix("Internal: ")  # without the stub's traceback
                return f"model {match[1]} did not load: {cause}"
        return f"the server ended with code {self.process.poll()}:\n{''.join(list(self._recent)[-20:])}"


def _environment(installation: ServerInstallation) -> dict[str, str]:
    """The stub takes its packages from the first `python3` on PATH, so that must be the running one."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if installation.library_path:
        folders = [*map(str, installation.library_path), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return environment


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{url}/v2/health/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
