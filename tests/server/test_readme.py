# SPDX-License-Identifier: Apache-2.0
"""Every example of the README runs as it stands; only ports are put in."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kimi_triton.text.options import GenerationOptions

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.server
@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[code.split("\n", 1)[0][:40] for _, code in BLOCKS])
def test_example_runs(language: str, code: str, live_server: Any, tmp_path: Path, png: Any) -> None:
    (tmp_path / "picture.png").write_bytes(png(80, 60))
    code = code.replace("localhost:8000", live_server.http_url).replace("localhost:8001", live_server.grpc_url)
    program = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [sys.executable, "-W", "ignore", "-c"]
    result = subprocess.run([*program, code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert '"error"' not in result.stdout


def test_there_are_two_commands_to_set_up() -> None:
    plain = re.findall(r"```\n(make .*?)\n```", README.read_text())
    assert plain == ["make demo", "make test"]


def test_the_options_table_is_that_of_the_code() -> None:
    text = README.read_text()
    for option in fields(GenerationOptions):
        assert f"| `{option.name}` | {option.metadata['doc']} |" in text


def test_files_that_the_readme_names_exist() -> None:
    package = README.parent / "python_backend" / "kimi_triton"
    named = re.findall(r"`((?:\w+/)?\w+\.py)`", README.read_text())
    assert len(named) > 8
    for name in named:
        assert any(
            str(file).endswith("/" + name) for file in [*package.rglob("*.py"), *README.parent.rglob("1/*.py")]
        ), name
