# SPDX-License-Identifier: Apache-2.0
"""Files are read back by safetensors itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kimi_client.embeds_file import EmbedsFile


def test_safetensors_reads_what_was_written_bit_for_bit(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(3)
    names = ["a.png", "b/ünï 猫.jpg", "empty"]
    wanted = {
        name: torch.randn(rows, 8, generator=random).bfloat16() for name, rows in zip(names, (3, 1, 0), strict=True)
    }
    with EmbedsFile(tmp_path / "x.safetensors", names) as file:
        for name, rows in wanted.items():
            file.add(name, rows.float().numpy())
    read = load_file(tmp_path / "x.safetensors")
    assert {name: (rows.dtype, rows.shape) for name, rows in read.items()} == {
        name: (torch.bfloat16, rows.shape) for name, rows in wanted.items()
    }
    assert all(torch.equal(read[name], rows) for name, rows in wanted.items())


def test_many_tensors_fit_the_room_left_for_the_header(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(500)]
    with EmbedsFile(tmp_path / "x.safetensors", names) as file:
        for i, name in enumerate(names):
            file.add(name, np.full((1 + i % 3, 4), i, np.float32))
    read = load_file(tmp_path / "x.safetensors")
    assert [int(read[name][0, 0]) for name in names[:256]] == list(range(256))  # BF16 counts exactly up to 256


def test_nothing_appears_when_the_work_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with EmbedsFile(tmp_path / "x.safetensors", ["a"]):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []
