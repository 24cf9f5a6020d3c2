# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several packages share."""

from __future__ import annotations

import io
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from PIL import Image

from kimi_triton.demo.tiny import write_tiny_checkpoint
from kimi_triton.serve.launch import launch
from kimi_triton.serve.options import ServeOptions

# A busy machine makes any example slow; the timeout of pytest still ends what hangs.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


# A runner that was put into the background ignores SIGINT, and children inherit that; Ctrl-C is under test here.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def png() -> Callable[..., bytes]:
    """png(width, height, seed=0): a PNG file of coloured noise."""

    def make(width: int, height: int, seed: int = 0) -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    return make


@pytest.fixture(scope="session")
def huge_png() -> bytes:
    """A valid header of a 20000 x 20000 PNG, followed by next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@contextmanager
def started(checkpoint: Path, run_folder: Path, **options: object) -> Iterator[LiveServer]:
    """A ready server for the time of the `with` block, on free ports."""
    values = {"dtype": "float32", "http_port": 0, "grpc_port": 0, "metrics_port": 0, "start_timeout_s": 120.0} | options
    log_file = run_folder / "server.log"
    serve_options = ServeOptions(checkpoint=checkpoint, log_file=log_file, **values)  # type: ignore[arg-type]
    with launch(serve_options, run_folder) as server:
        yield LiveServer(server.http_url, server.grpc_url, server.metrics_url, checkpoint, server.process.pid, log_file)
