# SPDX-License-Identifier: Apache-2.0
"""The breakdown that `serve --verbose` prints."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kimi_triton.serve.start_times import FirstProgress, explain_start, process_age_s

LOG = """\
I1130 17:16:21.091252 15490 cuda_memory_manager.cc:117] "CUDA memory pool disabled"
I1130 17:16:22.000000 15490 model_lifecycle.cc:472] "loading: moonvit:1"
I1130 17:16:22.100000 15490 model_lifecycle.cc:472] "loading: preprocess:1"
I1130 17:16:23.000000 15490 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: preprocess_0_1 (CPU device 0)"
I1130 17:16:24.100000 15490 model_lifecycle.cc:839] "successfully loaded 'preprocess'"
I1130 17:16:26.250000 15490 model_lifecycle.cc:839] "successfully loaded 'moonvit'"
I1130 17:16:26.260000 15490 model_lifecycle.cc:472] "loading: kimi_vision:1"
I1130 17:16:26.300000 15490 model_lifecycle.cc:839] "successfully loaded 'kimi_vision'"
"""
SIXTEEN_PAST_FIVE_PM = 17 * 3600 + 16 * 60


def test_every_second_is_named() -> None:
    weights_from = {"moonvit": SIXTEEN_PAST_FIVE_PM + 25.0}
    assert explain_start(1.0, 7.5, 5.0, LOG, weights_from).splitlines() == [
        "where the 7.5 s of the start went:",
        "    1.0 s  Python and imports of this command",
        "    1.5 s  checks of the checkpoint, and the model repository",
        "    0.7 s  the server before and after it loaded models",
        "    4.3 s  models, side by side:",
        "           moonvit        ready after 4.2 s: 3.0 s for its libraries, 1.2 s for its weights",
        "           preprocess     ready after 2.1 s",
        "           kimi_vision    ready after 4.3 s",
    ]


def test_a_start_over_midnight_is_not_negative() -> None:
    log = (
        'I1130 23:59:59.500000 1 model_lifecycle.cc:472] "loading: llm:1"\n'
        "I1201 00:00:02.500000 1 model_lifecycle.cc:839] \"successfully loaded 'llm'\"\n"
    )
    expected = "ready after 3.0 s: 1.0 s for its libraries, 2.0 s for its weights"
    assert expected in explain_start(0, 4, 4, log, {"llm": 0.5})


def test_a_log_in_another_form_still_gives_the_ages() -> None:
    assert explain_start(1, 4, 2, "nothing known", {}).splitlines()[0] == "where the 4.0 s of the start went:"


def test_only_the_first_progress_of_a_model_counts() -> None:
    shown: list[tuple[str, float]] = []
    progress = FirstProgress(lambda step, share: shown.append((step, share)))
    progress("llm", 0.1)
    first = dict(progress.seconds)
    time.sleep(0.01)
    progress("llm", 1.0)
    assert progress.seconds == first
    assert abs(time.time() % 86400 - first["llm"]) < 5
    assert shown == [("llm", 0.1), ("llm", 1.0)]


def test_the_age_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.5)
        assert process_age_s(process.pid) == pytest.approx(0.5, abs=0.4)
        assert process_age_s(os.getpid()) > process_age_s(process.pid)
