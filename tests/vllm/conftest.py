# SPDX-License-Identifier: Apache-2.0
"""One vLLM server for each family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.endless import make_endless
from tests.vllm.vllm_process import VllmProcess


@pytest.fixture(scope="package", params=["tiny_k25", "tiny_vl"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in which every expert sees every token, and whose greedy answers do not end early.

    vLLM computes in bf16 on CPUs. With random weights the choice of experts often hangs on the last bit, and another
    expert is another answer.
    """
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    shutil.copytree(request.getfixturevalue(request.param), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts_per_tok"] = config["text_config"]["n_routed_experts"]
    (folder / "config.json").write_text(json.dumps(config))
    return make_endless(folder)


@pytest.fixture(scope="package")
def vllm_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    server = VllmProcess(checkpoint, tmp_path_factory.mktemp("vllm") / "vllm.log").start()
    yield server
    server.kill()
