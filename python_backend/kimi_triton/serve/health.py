# SPDX-License-Identifier: Apache-2.0
"""Say how a server is: one round of probes for the command line, and a small page for orchestrators."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kimi_triton.errors import ConfigError
from kimi_triton.serve.probes import STAGES, probe

USABLE = ("ok", "busy")


def check_health(http_url: str, timeout_s: float) -> dict[str, object]:
    """One probe for each stage of the server at `http_url` (host:port)."""
    with ThreadPoolExecutor(len(STAGES)) as pool:
        findings = list(pool.map(lambda stage: (stage, probe(http_url, stage, timeout_s)), STAGES))
    stages = {stage: {"state": finding.state, "detail": finding.detail} for stage, finding in findings}
    for _, finding in findings:  # a stage may be known to be dead by the answer of another one
        if finding.certain and finding.stage in stages:
            stages[finding.stage] = {"state": finding.state, "detail": finding.detail}
    is_usable = all(stage["state"] in USABLE for stage in stages.values())
    return {"state": "ok" if is_usable else "ill", "stages": stages}


def is_usable(health: dict[str, object]) -> bool:
    """Whether requests can be answered now or in a moment."""
    return health["state"] in USABLE


class HealthPage:
    """GET /live says that the supervisor runs; GET /ready has the health as JSON, with status 503 unless usable."""

    def __init__(self, host: str, port: int, health: Callable[[], dict[str, object]]) -> None:
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(health))
        except OSError as exc:
            raise ConfigError(f"health port {port} on {host} cannot be used: {exc.strerror}") from exc
        self._server.daemon_threads = True
        self.url = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(health: Callable[[], dict[str, object]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # of a caller that sends nothing

        def do_GET(self) -> None:
            if self.path == "/live":
                self._answer(200, {"state": "ok"})
            elif self.path == "/ready":
                state = health()
                self._answer(200 if is_usable(state) else 503, state)
            else:
                self._answer(404, {"error": "there are /live and /ready"})

        def _answer(self, status: int, value: dict[str, object]) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: it is called every few seconds."""

    return Handler
