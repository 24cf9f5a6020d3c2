# SPDX-License-Identifier: Apache-2.0
"""`make bench-gpu` runs to its last line on a tiny tower, apart from CUDA itself, and says when there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def bench_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_gpu", *arguments]
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = bench_gpu(str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "bench-gpu needs a CUDA GPU, torch sees none\n"
    assert not any(tmp_path.iterdir())  # no checkpoint is written for nothing


def test_every_figure_is_there(tmp_path: Path) -> None:
    done = bench_gpu("--smoke", str(tmp_path / "checkpoint"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    works = {"1x16", "1x64", "4x4"}
    for field in ("patches_per_second", "peak_fraction"):
        assert set(result[field]) == works
        for figures in result[field].values():
            assert figures.keys() == {"eager", "transformers_sdpa"}
            assert min(figures.values()) > 0
    assert set(result["vs_transformers_sdpa"]) == works
    assert result["first_embedding_ms"]["16"] > result["first_embedding_ms"]["1"] > 0
    assert result["memory_mib"].keys() == {"weights", "graphs", "working"}
    assert result["skipped"].keys() == {"graphs", "transformers_flash"}
    assert (result["device"], result["fastest"], result["dtype"]) == ("cpu", "eager", "bfloat16")
    assert result["versions"]["torch"] == torch.__version__
