# SPDX-License-Identifier: Apache-2.0
"""Worker pools on tiny checkpoints, and images for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.layout import Parallel
from kimi_triton.vision.options import VisionOptions
from kimi_triton.workers.launch import launch_workers
from kimi_triton.workers.pool import WorkerPool


def vision_options(checkpoint: Path, parallel: Parallel = "data", num_workers: int = 1) -> VisionOptions:
    """float32, one thread, and each image in a forward of its own, so that its rows depend on nothing else."""
    return VisionOptions(
        checkpoint=checkpoint,
        dtype="float32",
        max_patches_per_forward=1,
        parallel=parallel,
        num_workers=num_workers,
        num_threads=1,
        start_timeout_s=120.0,
        stall_timeout_s=20.0,
    )


@contextmanager
def started_pool(options: VisionOptions) -> Iterator[WorkerPool]:
    pool = launch_workers(options, Checkpoint(options.checkpoint).config.vision, lambda _done, _total: None)
    try:
        yield pool
    finally:
        pool.stop()


def random_images(grids: Sequence[Grid], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(256, (num_patches(grid), 3, 14, 14), dtype=torch.uint8, generator=generator) for grid in grids
    ]


def pids(pool: WorkerPool) -> list[int]:
    return [pid for group in pool.groups for pid in group.pids]


def process_state(pid: int) -> str | None:
    """R, S, T, Z and so on; None for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None
