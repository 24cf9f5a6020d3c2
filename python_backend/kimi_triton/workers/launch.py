# SPDX-License-Identifier: Apache-2.0
"""Start the workers of one vision step, in either of two shapes."""

from __future__ import annotations

import os
from collections.abc import Callable

from kimi_triton.config import VisionConfig
from kimi_triton.vision.layout import check_shards
from kimi_triton.vision.options import VisionOptions
from kimi_triton.vision.work_log import WorkLog
from kimi_triton.workers.group import Timeouts, WorkerGroup
from kimi_triton.workers.messages import Progress, WorkerSettings
from kimi_triton.workers.pool import WorkerPool


def launch_workers(options: VisionOptions, config: VisionConfig, on_progress: Callable[[int, int], None]) -> WorkerPool:
    """A ready pool. Raises ConfigError, and leaves no process behind."""
    if options.parallel == "tensor":
        check_shards(config, options.num_workers)
    timeouts = Timeouts(start_s=options.start_timeout_s, stall_s=options.stall_timeout_s)
    report = _sum_of_progress(options.num_workers, on_progress)
    work_log = WorkLog(options.max_patches_per_forward)
    groups = [
        WorkerGroup(f"vision worker group {number}", settings, config.text_hidden_size, timeouts, work_log, report)
        for number, settings in enumerate(worker_groups(options))
    ]
    pool = WorkerPool(groups, work_log)
    pool.start()
    return pool


def worker_groups(options: VisionOptions) -> list[list[WorkerSettings]]:
    """data: groups of one, each with all weights and its own images. tensor: one group, each rank with its shard."""
    if options.parallel == "data":
        return [[_settings(options, worker)] for worker in range(options.num_workers)]
    return [[_settings(options, rank, rank, options.num_workers) for rank in range(options.num_workers)]]


def _settings(options: VisionOptions, worker: int, tp_rank: int = 0, tp_size: int = 1) -> WorkerSettings:
    return WorkerSettings(
        checkpoint=options.checkpoint,
        dtype=options.dtype,
        max_patches_per_forward=options.max_patches_per_forward,
        num_threads=options.num_threads or max(1, len(os.sched_getaffinity(0)) // options.num_workers),
        visible_device=options.devices[worker] if options.devices else None,
        use_graphs=options.use_graphs and tp_size == 1,
        use_compile=options.use_compile,
        tp_rank=tp_rank,
        tp_size=tp_size,
        collective_timeout_s=2 * options.stall_timeout_s,  # the parent, who knows why, gives up first
    )


def _sum_of_progress(
    num_workers: int, on_progress: Callable[[int, int], None]
) -> Callable[[WorkerSettings, Progress], None]:
    """Tensors loaded by all workers together."""
    done: dict[int, int] = {}

    def report(settings: WorkerSettings, progress: Progress) -> None:
        done[id(settings)] = progress.done
        on_progress(sum(done.values()), progress.total * num_workers)

    return report
