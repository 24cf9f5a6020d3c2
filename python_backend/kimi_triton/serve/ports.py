# SPDX-License-Identifier: Apache-2.0
"""The ports of one server."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass

from kimi_triton.errors import ConfigError


class PortTaken(ConfigError):
    """Somebody has taken a port between its choice and the server's start."""


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of one server."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def choose(cls, host: str, http: int, grpc: int, metrics: int) -> Ports:
        """Ports as asked for; 0 becomes a free one. Raises ConfigError when one is taken."""
        with ExitStack() as sockets:
            wanted = (("http", http), ("gRPC", grpc), ("metrics", metrics))
            listeners = [sockets.enter_context(_bound(host, name, port)) for name, port in wanted]
            return cls(*(listener.getsockname()[1] for listener in listeners))

    def check_free(self, host: str) -> None:
        """Raise PortTaken, naming the port, when another process has one of them."""
        try:
            self.choose(host, self.http, self.grpc, self.metrics)
        except ConfigError as exc:
            raise PortTaken(str(exc)) from exc


def _bound(host: str, name: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise ConfigError(f"{name} port {port} on {host} cannot be used: {exc.strerror}") from exc
    return listener
