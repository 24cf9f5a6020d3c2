# SPDX-License-Identifier: Apache-2.0
"""One Triton server process: start, wait until every model is ready, restart, stop, leave nothing behind.

Models are loaded on command, so that one which died can be replaced. Triton's repository API, which does that, would
let any caller unload models; it asks for a secret that only this process knows, as do the trace and log settings.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kimi_triton.errors import ConfigError
from kimi_triton.progress import parse_progress
from kimi_triton.serve.installation import ServerInstallation
from kimi_triton.serve.ports import Ports, PortTaken
from kimi_triton.serve.segments import Segments

EXIT_TIMEOUT_S = 5  # Triton lets requests finish for so long
START_ATTEMPTS = 3
SPIN_COUNT = 10_000  # turns, some 30 microseconds
KILL_AFTER_S = EXIT_TIMEOUT_S + 2.5
TIED = Path(__file__).with_name("tied.py")
ADMIN_HEADER = "kimi-triton-admin"
RESTRICTED = "model-repository,trace,logging"
METRICS_LOST = re.compile("failed to start Metrics service: .* already in use")
LOAD_ERROR = re.compile(r"failed to load '(\w+)' version \d+: (.+)")


class TritonServer:
    """A started server. `stop` (or leaving the `with` block) ends it and frees its shared memory."""

    def __init__(
        self, installation: ServerInstallation, repository: Path, host: str, ports: Ports, log_file: Path
    ) -> None:
        self.host, self.ports = host, ports
        self.segments = Segments()
        self.admin_key = secrets.token_hex(16)
        self._recent: deque[str] = deque(maxlen=200)
        self._on_progress: Callable[[str, float], None] | None = None
        self.log_file = log_file
        self._log = log_file.open("w", encoding="utf-8")
        self._arguments = self._command(installation, repository)
        self._environment = _environment(installation)
        self._start()

    def _start(self) -> None:
        """From a thread that lasts: the server is killed when the thread that started it ends."""
        self._recent.clear()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(TIED), str(os.getpid()), *self._arguments],
            env=self._environment,
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
        """Block until every model is ready or `is_stopped`. Raises ConfigError with the server's reason otherwise.

        The reason is PortTaken when somebody else has one of its ports.
        A server that a signal ends is started again: on crowded machines old ones abort while they load, because they
        take a lock that is held for long for one that is lost.
        """
        self._on_progress = on_progress
        deadline = time.monotonic() + timeout_s
        num_restarts = 0
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                if code < 0 and num_restarts < START_ATTEMPTS - 1 and not is_stopped():
                    num_restarts += 1
                    self.restart()
                    continue
                self._reader.join(timeout=2)
                self.ports.check_free(self.host)
                raise ConfigError(self._reason())
            if METRICS_LOST.search("".join(self._recent)):  # the server goes on without them
                raise PortTaken(f"metrics port {self.ports.metrics} on {self.host} was taken during the start")
            if is_stopped() or (self.is_ready and _answers(f"http://{self.metrics_url}/metrics")):
                return
            time.sleep(0.1)
        raise ConfigError(f"the server was not ready after {timeout_s:.0f} s; {self._reason()}")

    @property
    def is_ready(self) -> bool:
        """Whether every model is loaded. It stays true when one dies."""
        return _answers(f"http://{self.http_url}/v2/health/ready")

    def restart(self) -> None:
        """Replace the process at once; requests that it holds end with their connections."""
        self._end()
        self._start()

    def stop(self) -> None:
        """End the server and everything it started, within KILL_AFTER_S and a little."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=KILL_AFTER_S)
        self._end()
        self._log.close()
        self.segments.remove()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # its stubs share its session
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(timeout=2)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.segments.remove_contents()

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
            f"--backend-config=python,shm-region-prefix-name={self.segments.prefix}",
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--http-restricted-api={RESTRICTED}:{ADMIN_HEADER}={self.admin_key}",
            f"--grpc-restricted-protocol={RESTRICTED}:{ADMIN_HEADER}={self.admin_key}",
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
    """The stub takes its packages from the first `python3` on PATH, so that must be the running one.

    Threads of one computation wait for each other by spinning, for 300,000 turns unless told otherwise. Beside a
    language model on the same cores they would keep each other, and Triton, from running for up to seconds.
    """
    environment = {"GOMP_SPINCOUNT": str(SPIN_COUNT)} | os.environ
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if installation.library_path:
        folders = [*map(str, installation.library_path), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return environment


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
