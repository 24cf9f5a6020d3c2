# SPDX-License-Identifier: Apache-2.0
"""What the processes of a running server have in memory: one lesson the project started from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from kimi_triton.serve.server import SPIN_COUNT

pytestmark = pytest.mark.server
FOREIGN = ("libtorch", "libcuda.so", "libcudart", "libc10", "libnccl")


def stub_of(server: Any, model: str) -> list[psutil.Process]:
    """The Python backend's stub processes of `model`; the model's folder is on their command line."""
    children = psutil.Process(server.pid).children(recursive=True)
    return [child for child in children if any(part.endswith(f"/{model}/1/model.py") for part in child.cmdline())]


def foreign_libraries(process: psutil.Process) -> set[str]:
    """torch and CUDA libraries of a process. The stub's own executable links libcudart, which opens no context by
    itself; the server brings that copy along, so it tells nothing about the model."""
    mapped = {mapping.path for mapping in process.memory_maps()}
    return {
        path
        for path in mapped
        if any(name in Path(path).name for name in FOREIGN) and Path(path).parent.name != "nvidia_pytriton.libs"
    }


def test_preprocess_maps_neither_torch_nor_cuda(live_server: Any, caller: Any, png: Any) -> None:
    caller.unary("Hello", [png(56, 56)], max_tokens=1)
    stubs = stub_of(live_server, "preprocess")
    assert len(stubs) == 2
    for stub in stubs:
        assert foreign_libraries(stub) == set()


def test_the_check_above_can_fail(live_server: Any) -> None:
    """The same look at moonvit does find torch, so an empty result means something."""
    (stub,) = stub_of(live_server, "moonvit")
    assert any("libtorch" in path for path in foreign_libraries(stub))


def test_image_grid_thw_reaches_moonvit_in_host_memory(live_server: Any, caller: Any, png: Any) -> None:
    """moonvit refuses a grid in GPU memory, so an answer means that it came in host memory."""
    rows, grid = caller.embed([png(56, 84)])
    assert (len(rows), grid.tolist()) == (6, [[1, 6, 4]])
    assert "in GPU memory" not in live_server.log_file.read_text()


def test_threads_of_a_step_give_up_their_core_soon(live_server: Any) -> None:
    for model in ("moonvit", "llm"):
        (stub,) = stub_of(live_server, model)
        assert stub.environ()["GOMP_SPINCOUNT"] == os.environ.get("GOMP_SPINCOUNT", str(SPIN_COUNT))
