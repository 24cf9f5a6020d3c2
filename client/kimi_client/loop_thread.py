# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread of its own, so that code without one can use the asyncio client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any thread. `stop` lets the unfinished ones end first."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kimi-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result.

        An exception that strikes the waiting thread, such as Ctrl-C, cancels the coroutine, which then cleans up in
        the loop's thread; `stop` waits for that.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of no effect where the exception is the coroutine's own
            raise

    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Let what is unfinished end, run one last coroutine, and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            last.close()
            return
        self.run(self._finish(timeout_s))
        self.run(last)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self, timeout_s: float) -> None:
        await self._loop.shutdown_asyncgens()
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        if unfinished:
            await asyncio.wait(unfinished, timeout=timeout_s)
