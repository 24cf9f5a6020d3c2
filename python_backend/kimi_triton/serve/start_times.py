# SPDX-License-Identifier: Apache-2.0
"""Where the time of a start goes, from the ages of processes and the times in the server's log."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TIME = r"[IWE]\d{4} (\d\d):(\d\d):(\d\d\.\d+) .*"
STARTED = re.compile(TIME + r"loading: (\w+):1\"")
LOADED = re.compile(TIME + r"successfully loaded '(\w+)'")
DAY_S = 24 * 3600
COLUMN = 14  # characters of a model's name


@dataclass(slots=True)
class ModelTimes:
    """Seconds of the day (UTC, as in the log) at which a model was asked for and ready."""

    started: float
    loaded: float | None = None


class FirstProgress:
    """Passes progress on and remembers when each model first reported any, which is when its weights began to load."""

    def __init__(self, on_progress: Callable[[str, float], None]) -> None:
        self._on_progress = on_progress
        self.seconds: dict[str, float] = {}  # of the day, UTC

    def __call__(self, step: str, share: float) -> None:
        self.seconds.setdefault(step, time.time() % DAY_S)
        self._on_progress(step, share)


def process_age_s(pid: int) -> float:
    """Seconds since the process `pid` began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after the machine, in field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def explain_start(
    imports_s: float, command_s: float, server_s: float, log: str, weights_from: Mapping[str, float]
) -> str:
    """A few lines that say where the time went.

    imports_s: until the command began its work; command_s and server_s: ages of both processes when all was ready;
    log: what the server has written; weights_from: FirstProgress.seconds.
    """
    models = _read_log(log)
    first = min((times.started for times in models.values()), default=0.0)
    loading_s = max((_after(first, times.loaded) for times in models.values() if times.loaded is not None), default=0.0)
    return "\n".join(
        [
            f"where the {command_s:.1f} s of the start went:",
            f"  {imports_s:5.1f} s  Python and imports of this command",
            f"  {command_s - imports_s - server_s:5.1f} s  checks of the checkpoint, and the model repository",
            f"  {server_s - loading_s:5.1f} s  the server before and after it loaded models",
            f"  {loading_s:5.1f} s  models, side by side:",
            *_model_lines(models, first, weights_from),
        ]
    )


def _model_lines(models: dict[str, ModelTimes], first: float, weights_from: Mapping[str, float]) -> Iterator[str]:
    for name, times in models.items():  # in the order in which they were asked for
        if times.loaded is None:
            continue
        line = f"           {name:<{COLUMN}} ready after {_after(first, times.loaded):.1f} s"
        if name in weights_from:
            libraries_s, weights_s = _after(times.started, weights_from[name]), _after(weights_from[name], times.loaded)
            line += f": {libraries_s:.1f} s for its libraries, {weights_s:.1f} s for its weights"
        yield line


def _read_log(log: str) -> dict[str, ModelTimes]:
    models: dict[str, ModelTimes] = {}
    for line in log.splitlines():
        if match := STARTED.match(line):
            models[match[4]] = ModelTimes(_seconds(match))
        elif (match := LOADED.match(line)) and match[4] in models:
            models[match[4]].loaded = _seconds(match)
    return models


def _seconds(match: re.Match[str]) -> float:
    return 3600 * int(match[1]) + 60 * int(match[2]) + float(match[3])


def _after(earlier: float, later: float) -> float:
    """Seconds between two times of the day, of which the later may be past midnight."""
    return (later - earlier) % DAY_S
