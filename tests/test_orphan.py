# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import time

from kimi_triton.serve.stubs import is_alive

STUCK = """
import threading
from kimi_triton.orphan import end_when_orphaned
end_when_orphaned()
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire).start()  # Python waits for such threads when it ends
print("stuck", flush=True)
lock.acquire()
"""
# The server's part: starts the process above and says its id.
SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_process_whose_threads_hang_ends_with_its_server() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER, STUCK], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        orphan = int(server.stdout.readline())
        assert is_alive(orphan)
        server.kill()
        deadline = time.monotonic() + 10
        while is_alive(orphan) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(orphan)
