# SPDX-License-Identifier: Apache-2.0
"""Fair timing: contenders take turns, the median counts, and the last line is one JSON object."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
Work = Callable[[], object]


def interleaved(contenders: Mapping[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contender in turns A B A B …, after one round that is not counted.

    Work that returns a float has timed itself, for example in a process of its own.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, work in contenders.items():
            start = time.perf_counter()
            own = work()
            spent = own if isinstance(own, float) else time.perf_counter() - start
            if turn:
                seconds[name].append(spent)
    return seconds


def ratios(seconds: Mapping[str, list[float]], slow: str, fast: str) -> float:
    """How many times as fast `fast` is, as the median over the turns."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def show(title: str, seconds: Mapping[str, list[float]]) -> None:
    spread = ", ".join(
        f"{name} {statistics.median(values) * 1e3:.1f} ms ({min(values) * 1e3:.1f}-{max(values) * 1e3:.1f})"
        for name, values in seconds.items()
    )
    print(f"{title}: {spread}", flush=True)


def surroundings(**more: object) -> dict[str, object]:
    """What a figure depends on."""
    packages = ("torch", "transformers", "numpy", "pillow")
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        **more,
    }


def finish(**result: object) -> None:
    """The last line."""
    print(json.dumps(result), flush=True)


class Peer:
    """A contender in another Python environment: a script that answers each line with a JSON line."""

    def __init__(self, python: Path, script: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()

    def ask(self, line: str) -> float:
        """Seconds that the peer spent on the work named by `line`."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # vLLM prints lines of its own as well
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the peer ended with code {self._process.wait()}")
