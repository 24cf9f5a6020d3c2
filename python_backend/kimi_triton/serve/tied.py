# SPDX-License-Identifier: Apache-2.0
"""Become another program that is killed as soon as the process that started it ends, however that ends.

Run as a file: `python -I -S tied.py PARENT_PID PROGRAM ARGUMENT...`. Linux ties the two for as long as the thread that
started this one lives, so that must be one which lasts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        sys.exit(1)
    os.execv(program[0], program)
