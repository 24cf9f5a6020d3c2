# SPDX-License-Identifier: Apache-2.0
"""Rows of the token embedding, read in place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.llm.text_rows import TABLE, TextRows


@pytest.fixture(params=["tiny_k25", "tiny_vl"])
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


def test_rows_are_those_that_are_stored(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    table = dict(checkpoint.read([TABLE]))[TABLE]
    ids = torch.tensor([0, len(table) - 1, 7, 7, 300])
    rows = TextRows(checkpoint)(ids)
    assert rows.dtype == table.dtype
    assert torch.equal(rows, table[ids])


def test_rows_are_a_copy(folder: Path) -> None:
    rows = TextRows(Checkpoint(folder))
    first = rows(torch.tensor([3]))
    expected = first.clone()
    first.zero_()
    assert torch.equal(rows(torch.tensor([3])), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_floating_point_types_are_read(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    table = stored_as(dtype, folder, tmp_path / "copy")
    rows = TextRows(Checkpoint(tmp_path / "copy"))(torch.tensor([5, 1]))
    assert torch.equal(rows, table[[5, 1]])


def test_other_types_are_refused(folder: Path, tmp_path: Path) -> None:
    stored_as(torch.float64, folder, tmp_path / "copy")
    with pytest.raises(ConfigError, match="is stored as F64, expected one of BF16, F16, F32"):
        TextRows(Checkpoint(tmp_path / "copy"))


def stored_as(dtype: torch.dtype, folder: Path, copy: Path) -> torch.Tensor:
    """A copy of the checkpoint with another type of table; returns that table."""
    shutil.copytree(folder, copy)
    shard = Checkpoint(copy).tensors[TABLE].file
    weights = load_file(shard)
    weights[TABLE] = weights[TABLE].to(dtype)
    save_file(weights, shard, metadata={"format": "pt"})
    return weights[TABLE]
