# SPDX-License-Identifier: Apache-2.0
"""Every example of the client's README runs as it stands, in order and in one folder; only ports are put in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kimi_client.__main__ import EXIT_CODES, build_parser
from kimi_client.load import perf_analyzer

README = Path(__file__).parents[2] / "client" / "README.md"
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run, with the picture they ask about."""
    folder = tmp_path_factory.mktemp("readme")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    return folder


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment of a user who has fetched perf_analyzer and put it on the PATH."""
    assert perf_analyzer.main() == 0
    found = perf_analyzer.find_perf_analyzer()
    folders = [str(Path(sys.executable).parent), str(found.path.parent), found.environment["PATH"]]
    return found.environment | {"PATH": os.pathsep.join(folders)}


@pytest.mark.server
@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[code.strip().split("\n")[0][:40] for _, code in BLOCKS])
def test_example_runs(language: str, code: str, live_server: Any, folder: Path, environment: dict[str, str]) -> None:
    ports = {"8000": live_server.http_url, "8001": live_server.grpc_url, "8002": live_server.metrics_url}
    for port, address in ports.items():
        code = code.replace(f"localhost:{port}", address)
    program = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [sys.executable, "-W", "error", "-c"]
    done = subprocess.run(
        [*program, code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout
    assert "Traceback" not in done.stderr


def test_the_exit_codes_named_are_those_of_the_code() -> None:
    text = README.read_text().replace("\n", " ")
    for code in {0, 1, 6, 130, 141, *EXIT_CODES.values()}:
        assert re.search(rf"\b{code} \w+", text[text.index("The exit code tells") :]), code


def test_every_command_is_shown() -> None:
    commands = next(action for action in build_parser()._actions if action.metavar == "COMMAND").choices
    assert commands is not None
    for command in commands:
        assert f"kimi-client {command}" in README.read_text()
