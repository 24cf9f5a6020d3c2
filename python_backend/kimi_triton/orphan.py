# SPDX-License-Identifier: Apache-2.0
"""End this process when the server that started it is gone.

Triton's stub looks for that too, and then waits for its threads; one that was just sending something to the server
waits for ever, and the process keeps its memory.
"""

from __future__ import annotations

import os
import threading
import time
from functools import cache

LOOK_EVERY_S = 0.1  # the stub itself looks every 0.3 s


@cache
def end_when_orphaned() -> None:
    """Look from now on, in a thread that needs nothing another thread could hold."""
    threading.Thread(target=_look, args=(os.getppid(),), name="orphan", daemon=True).start()


def _look(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os._exit(1)
