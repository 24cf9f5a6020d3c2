# SPDX-License-Identifier: Apache-2.0
"""Threads and processes take turns, and one that is killed locks nobody out."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kimi_triton.shared_table import SharedTable

ROW = np.dtype([("value", np.int64)])


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    table = SharedTable(tmp_path / "table", ROW, 1)

    def add_one(_: int) -> None:
        with table.locked() as rows:
            value = int(rows["value"][0])
            time.sleep(0.001)  # another thread would read the old value now
            rows["value"][0] = value + 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_one, range(80)))
    with table.locked() as rows:
        assert rows["value"][0] == 80
    table.clear()
    with table.locked() as rows:
        assert rows["value"][0] == 0


def test_processes_share_it_and_one_that_is_killed_locks_nobody_out(tmp_path: Path) -> None:
    table = SharedTable(tmp_path / "table", ROW, 4)
    program = """
import os, signal, sys
from pathlib import Path
import numpy as np
from kimi_triton.shared_table import SharedTable
with SharedTable(Path(sys.argv[1]), np.dtype([("value", np.int64)]), 4).locked() as rows:
    rows["value"][2] = 7
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program, str(table.file)], check=False)
    with table.locked() as rows:
        assert rows["value"].tolist() == [0, 0, 7, 0]
    table.remove()
    assert not table.file.exists()
