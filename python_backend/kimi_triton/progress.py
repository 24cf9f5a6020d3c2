# SPDX-License-Identifier: Apache-2.0
"""Loading progress of a step: one line on standard error, which `kimi-triton serve` turns into a bar."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

LINE = re.compile(r"\[kimi-triton\] loading (\S+) (\d+) of (\d+)")
EVERY_S = 0.2


def progress_printer(step: str) -> Callable[[int, int], None]:
    """A callback (done, total) that writes at most one line per EVERY_S, and always the last one."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= EVERY_S:
            last = now
            sys.stderr.write(f"[kimi-triton] loading {step} {done} of {total}\n")
            sys.stderr.flush()

    return report


def parse_progress(line: str) -> tuple[str, float] | None:
    """(step, share done) of a line that `progress_printer` wrote, else None."""
    match = LINE.search(line)
    return (match[1], int(match[2]) / max(int(match[3]), 1)) if match else None
