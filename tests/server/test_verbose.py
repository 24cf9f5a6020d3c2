# SPDX-License-Identifier: Apache-2.0
"""`kimi-triton serve --verbose` says where the time of the start went."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.server.test_serve_command import command, read_until_ready

pytestmark = pytest.mark.server
READY = re.compile(r"(\w+) +ready after ([\d.]+) s")
WEIGHTS = re.compile(r"(\w+) +ready after ([\d.]+) s: ([\d.]+) s for its libraries, ([\d.]+) s for its weights")


def test_every_step_and_every_second_of_the_start(tiny_k25: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(command(tiny_k25, "--verbose"), stdout=pipe, stderr=pipe, text=True) as process:
        read_until_ready(process)
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=30)
    total = re.search(r"where the ([\d.]+) s of the start went:", printed)
    assert total, printed
    parts = [float(seconds) for seconds in re.findall(r"^ +([\d.]+) s  ", printed, re.MULTILINE)]
    assert len(parts) == 4
    assert sum(parts) == pytest.approx(float(total[1]), abs=0.25)  # each is rounded to a tenth
    ready = {match[1]: float(match[2]) for match in READY.finditer(printed)}
    assert ready.keys() >= {"preprocess", "moonvit", "llm", "kimi_vision", "kimi_vl", "kimi_vl_unary"}
    assert max(ready.values()) == parts[-1]
    weights = {match[1]: [float(match[i]) for i in (2, 3, 4)] for match in WEIGHTS.finditer(printed)}
    assert weights.keys() == {"moonvit", "llm"}
    for ready_s, libraries_s, weights_s in weights.values():
        assert 0 < libraries_s <= ready_s
        assert libraries_s + weights_s == pytest.approx(ready_s, abs=0.25)
