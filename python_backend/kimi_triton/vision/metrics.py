# SPDX-License-Identifier: Apache-2.0
"""What the vision step publishes on Triton's metrics endpoint. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kimi_triton.metric import Metric, MetricSpec

if TYPE_CHECKING:
    from kimi_triton.vision.grids import Grid
    from kimi_triton.vision.work_log import Work

VISION_METRICS = (
    MetricSpec("kimi_vision_images", "counter", "Images of valid requests"),
    MetricSpec("kimi_vision_patches", "counter", "Patches of these images"),
    MetricSpec("kimi_vision_cache_hits", "counter", "Images that cost no encoding: remembered, or encoded for another"),
    MetricSpec("kimi_vision_cache_misses", "counter", "Images that were encoded"),
    MetricSpec("kimi_vision_cache_mismatches", "counter", "Remembered images dropped for a wrong number of rows"),
    MetricSpec("kimi_vision_cache_bytes", "gauge", "Bytes of remembered images"),
    MetricSpec("kimi_vision_worker_restarts", "counter", "Times that worker processes were started again"),
    MetricSpec(
        "kimi_vision_forward_patches",
        "histogram",
        "Patches of each forward",
        (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    ),
    MetricSpec("kimi_vision_forward_images", "histogram", "Images of each forward", (1, 2, 4, 8, 16, 32, 64, 128)),
    MetricSpec(
        "kimi_vision_encode_ms",
        "histogram",
        "Milliseconds that one process, or one group sharing weights, took for its images of a batch",
        (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000),
    ),
)


class VisionMetrics:
    """Counts batches. Totals kept elsewhere are published as what was added since the last batch."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        """`metrics` by the names of VISION_METRICS."""
        self._metrics = metrics
        self._published: dict[str, int] = {}

    def count_images(self, grids: Iterable[Grid], is_cached: Iterable[bool]) -> None:
        cached = list(is_cached)
        self._add("images", len(cached))
        self._add("patches", sum(t * h * w for t, h, w in grids))
        self._add("cache_hits", sum(cached))
        self._add("cache_misses", len(cached) - sum(cached))

    def count_work(self, work: Iterable[Work]) -> None:
        for done in work:
            self._metrics["kimi_vision_encode_ms"].observe(done.milliseconds)
            for forward in done.forwards:
                self._metrics["kimi_vision_forward_patches"].observe(forward.num_patches)
                self._metrics["kimi_vision_forward_images"].observe(forward.num_images)

    def publish(self, *, cache_bytes: int, cache_mismatches: int, worker_restarts: int) -> None:
        self._metrics["kimi_vision_cache_bytes"].set(cache_bytes)
        for name, total in (("cache_mismatches", cache_mismatches), ("worker_restarts", worker_restarts)):
            self._add(name, total - self._published.get(name, 0))
            self._published[name] = total

    def _add(self, name: str, amount: int) -> None:
        if amount:
            self._metrics[f"kimi_vision_{name}"].increment(amount)
