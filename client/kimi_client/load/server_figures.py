# SPDX-License-Identifier: Apache-2.0
"""The server's own count of what it did, from its statistics and metrics, as the difference of two readings."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.error import URLError

from kimi_client.errors import ServerUnavailable

STEPS = ("preprocess", "moonvit", "llm")
COMPLETION_TOKENS = "kimi_llm_completion_tokens"
TIMEOUT_S = 10.0
SETTLE_PAUSE_S = 0.25
SETTLE_TRIES = 20

_PHASES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_METRIC = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean milliseconds that a request waited for a step and was worked on in it."""

    queue_ms: float
    compute_ms: float


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters of the server at one moment: (model, phase) -> (count, ns), and metrics summed over labels."""

    statistics: Mapping[tuple[str, str], tuple[int, int]]
    metrics: Mapping[str, float]

    def since(self, before: Reading) -> Reading:
        """Return what was added after an earlier reading."""
        zero = (0, 0)
        statistics = {
            key: (count - before.statistics.get(key, zero)[0], ns - before.statistics.get(key, zero)[1])
            for key, (count, ns) in self.statistics.items()
        }
        metrics = {name: value - before.metrics.get(name, 0.0) for name, value in self.metrics.items()}
        return Reading(statistics, metrics)

    def count(self, model: str, phase: str) -> int:
        return self.statistics.get((model, phase), (0, 0))[0]

    def mean_ms(self, model: str, *phases: str) -> float:
        """Mean milliseconds of some phases together over the successful requests of a model."""
        nanoseconds = sum(self.statistics.get((model, phase), (0, 0))[1] for phase in phases)
        return nanoseconds / 1e6 / max(1, self.count(model, "success"))

    def step_times(self, model: str) -> dict[str, StepTime]:
        """Return where the requests of an ensemble spent their time.

        The statistics of `llm` end when it has taken a request in, long before its answer ends; what the whole request
        took beyond the other steps is its. How much of that was waiting is known only until it was taken in.
        """
        computing = ("compute_input", "compute_infer", "compute_output")
        times = {step: StepTime(self.mean_ms(step, "queue"), self.mean_ms(step, *computing)) for step in STEPS[:2]}
        known = sum(time.queue_ms + time.compute_ms for time in times.values())
        queue = self.mean_ms("llm", "queue")
        times["llm"] = StepTime(queue, max(0.0, self.mean_ms(model, "success") - known - queue))
        return times


def read_figures(http_url: str, metrics_url: str) -> Reading:
    """Read both endpoints, given as host:port."""
    statistics: dict[tuple[str, str], tuple[int, int]] = {}
    for model in json.loads(_get(f"http://{http_url}/v2/models/stats"))["model_stats"]:
        for phase in _PHASES:
            entry = model["inference_stats"][phase]
            statistics[model["name"], phase] = (int(entry["count"]), int(entry["ns"]))
    metrics: dict[str, float] = {}
    for name, value in _METRIC.findall(_get(f"http://{metrics_url}/metrics")):
        metrics[name] = metrics.get(name, 0.0) + float(value)
    return Reading(statistics, metrics)


def settled_figures(http_url: str, metrics_url: str) -> Reading:
    """Read both endpoints until the counts stand still: the server publishes them a moment after the work is done."""
    reading = read_figures(http_url, metrics_url)
    for _ in range(SETTLE_TRIES):
        time.sleep(SETTLE_PAUSE_S)
        previous, reading = reading, read_figures(http_url, metrics_url)
        tokens = [taken.metrics.get(COMPLETION_TOKENS) for taken in (previous, reading)]
        if previous.statistics == reading.statistics and tokens[0] == tokens[1]:
            break
    return reading


def server_version(http_url: str) -> str:
    """Return Triton's version; raises ServerUnavailable where nobody answers."""
    version: str = json.loads(_get(f"http://{http_url}/v2"))["version"]
    return version


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            text: str = response.read().decode()
            return text
    except (URLError, OSError) as error:
        raise ServerUnavailable(f"cannot read {url}: {error} (try again later)") from error
