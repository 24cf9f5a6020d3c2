# SPDX-License-Identifier: Apache-2.0
"""Shared memory of dead servers goes, that of living ones stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kimi_triton.serve.segments import Segments, remove_abandoned

KILLED = """
import os, signal, sys
from pathlib import Path
from kimi_triton.serve.segments import Segments
segments = Segments(Path(sys.argv[1]))
(Path(sys.argv[1]) / f"{segments.prefix}data").write_text("pixels")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    segments = Segments(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [f"{segments.prefix}lock"]
    segments.remove()


def test_what_a_living_one_uses_stays(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    used = tmp_path / f"{segments.prefix}used"
    used.write_text("pixels")
    remove_abandoned(tmp_path)
    assert used.exists()
    segments.remove_contents()
    assert not used.exists()
    segments.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_own_segments_can_be_removed_by_name(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    foreign, own = tmp_path / "somebody_elses", tmp_path / f"{segments.prefix}own"
    foreign.touch()
    own.touch()
    segments.remove_named(foreign.name)
    segments.remove_named(own.name)
    assert foreign.exists()
    assert not own.exists()
    segments.remove()


def test_two_servers_of_one_process_have_names_of_their_own(tmp_path: Path) -> None:
    first, second = Segments(tmp_path), Segments(tmp_path)
    assert first.prefix != second.prefix
    assert str(os.getpid()) in first.prefix
    first.remove()
    assert (tmp_path / f"{second.prefix}lock").exists()
    second.remove()
