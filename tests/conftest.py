# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several packages share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kimi_triton.demo.tiny import write_tiny_checkpoint
from kimi_triton.serve.launch import launch
from kimi_triton.serve.options import ServeOptions


@dataclass(frozen=True)
class LiveServer:
    """A real Triton server with the whole ensemble, on ports of its own. URLs are host:port."""

    http_url: str
    grpc_url: str
    metrics_url: str
    checkpoint: Path
    pid: int
    log_file: Path


@pytest.fixture(scope="session")
def tiny_k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi-K2.5 checkpoint folder. Read only: copy it before damaging it."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny_k25"), "kimi_k25")


@pytest.fixture(scope="session")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi-VL checkpoint folder. Read only: copy it before damaging it."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny_vl"), "kimi_vl")


@pytest.fixture(scope="session")
def live_server(tiny_k25: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of the tiny K2.5 checkpoint in float32."""
    with started(tiny_k25, tmp_path_factory.mktemp("server_k25")) as server:
        yield server


@pytest.fixture(scope="session")
def live_server_vl(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of the tiny Kimi-VL checkpoint in float32."""
    with started(tiny_vl, tmp_path_factory.mktemp("server_vl")) as server:
        yield server


@contextmanager
def started(checkpoint: Path, run_folder: Path, **options: object) -> Iterator[LiveServer]:
    """A ready server for the time of the `with` block, on free ports."""
    values = {"dtype": "float32", "http_port": 0, "grpc_port": 0, "metrics_port": 0, "start_timeout_s": 120.0} | options
    log_file = run_folder / "server.log"
    serve_options = ServeOptions(checkpoint=checkpoint, log_file=log_file, **values)  # type: ignore[arg-type]
    with launch(serve_options, run_folder) as server:
        yield LiveServer(server.http_url, server.grpc_url, server.metrics_url, checkpoint, server.process.pid, log_file)
