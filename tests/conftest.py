# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several packages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_triton.demo.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi-K2.5 checkpoint folder. Read only: copy it before damaging it."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny_k25"), "kimi_k25")


@pytest.fixture(scope="session")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi-VL checkpoint folder. Read only: copy it before damaging it."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny_vl"), "kimi_vl")
