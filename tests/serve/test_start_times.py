# SPDX-License-Identifier: Apache-2.0
"""The breakdown that `serve --verbose` prints."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kimi_triton.serve.start_times import explain_start, process_age_s

LOG = """\
I1130 17:16:22.091252 15490 cuda_memory_manager.cc:117] "CUDA memory pool disabled"
I1130 17:16:22.000000 15490 model_lifecycle.cc:472] "loading: moonvit:1"
I1130 17:16:22.100000 15490 model_lifecycle.cc:472] "loading: preprocess:1"
I1130 17:16:23.000000 15490 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: preprocess_0_1 (CPU device 0)"
I1130 17:16:23.600000 15490 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: preprocess_0_0 (CPU device 0)"
I1130 17:16:24.100000 15490 model_lifecycle.cc:839] "successfully loaded 'preprocess'"
I1130 17:16:25.000000 15490 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: moonvit_0_0 (CPU device 0)"
I1130 17:16:26.250000 15490 model_lifecycle.cc:839] "successfully loaded 'moonvit'"
I1130 17:16:26.250000 15490 model_lifecycle.cc:472] "loading: kimi_vision:1"
I1130 17:16:26.251000 15490 model_lifecycle.cc:839] "successfully loaded 'kimi_vision'"
"""


def test_every_second_is_named() -> None:
    assert explain_start(imports_s=1.0, command_s=7.5, server_s=5.0, log=LOG).splitlines() == [
        "where the 7.5 s of the start went:",
        "    1.0 s  Python and imports of this command",
        "    1.5 s  checks of the checkpoint, and the model repository",
        "    0.7 s  the server before and after it loaded models",
        "    4.3 s  models, side by side:",
        "           preprocess     ready after 2.1 s: 1.5 s for its processes and imports, 0.5 s for its weights",
        "           moonvit        ready after 4.2 s: 3.0 s for its processes and imports, 1.2 s for its weights",
    ]


def test_a_start_over_midnight_is_not_negative() -> None:
    log = (
        'I1130 23:59:59.500000 1 model_lifecycle.cc:472] "loading: llm:1"\n'
        'I1201 00:00:00.500000 1 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: llm_0_0 (CPU device 0)"\n'
        "I1201 00:00:02.500000 1 model_lifecycle.cc:839] \"successfully loaded 'llm'\"\n"
    )
    assert "ready after 3.0 s: 1.0 s for its processes and imports, 2.0 s" in explain_start(0, 4, 4, log)


def test_a_log_in_another_form_still_gives_the_ages() -> None:
    assert explain_start(1, 4, 2, "nothing known").splitlines()[0] == "where the 4.0 s of the start went:"


def test_the_age_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.5)
        assert process_age_s(process.pid) == pytest.approx(0.5, abs=0.4)
        assert process_age_s(os.getpid()) > process_age_s(process.pid)
