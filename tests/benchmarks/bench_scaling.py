# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of the encoder as work grows: 1 to 64 images of 256 patches, and one image of 256 to 16,800."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from kimi_triton.vision.encoder import LocalEncoder
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.local import load_from_folder
from tests.benchmarks.full_size import write_full_size_checkpoint
from tests.benchmarks.measure import ROOT, finish, surroundings

MANY_IMAGES = {count: [(1, 16, 16)] * count for count in (1, 4, 16, 64)}
LARGE_IMAGES = {h * w: [(1, h, w)] for h, w in ((16, 16), (32, 32), (64, 64), (96, 96), (112, 150))}
MAX_PATCHES_PER_FORWARD = 4096


def main(folder: Path) -> None:
    checkpoint = write_full_size_checkpoint(folder)
    images = {count: measured(checkpoint, grids) for count, grids in MANY_IMAGES.items()}
    patches = {count: measured(checkpoint, grids) for count, grids in LARGE_IMAGES.items()}
    finish(images=images, patches=patches, **surroundings(dtype="bfloat16", threads=torch.get_num_threads()))


def measured(checkpoint: Path, grids: list[Grid]) -> dict[str, float]:
    """In a process of its own, because peak memory never falls."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_scaling", str(checkpoint), json.dumps(grids)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    print(f"{len(grids)} x {num_patches(grids[0])} patches: {result}", flush=True)
    return result


def measure_here(checkpoint: Path, grids: list[Grid]) -> None:
    device = torch.device("cpu")
    model = load_from_folder(checkpoint, device, "bfloat16", lambda _done, _total: None)
    encoder = LocalEncoder(model, device, MAX_PATCHES_PER_FORWARD)
    encoder.encode([torch.zeros(4, 3, 14, 14, dtype=torch.uint8)], [(1, 2, 2)])
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    images = [torch.randint(0, 256, (num_patches(grid), 3, 14, 14), dtype=torch.uint8) for grid in grids]
    start = time.perf_counter()
    encoder.encode(images, grids)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    finish(seconds=round(seconds, 3), peak_mib_above_weights=round((peak - base) / 1024))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        measure_here(Path(sys.argv[1]), [(t, h, w) for t, h, w in json.loads(sys.argv[2])])
