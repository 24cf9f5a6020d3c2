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
        self._running: set[asyncio.Task[Any] | None] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kimi-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result.

        An exception that strikes the waiting thread, such as Ctrl-C, cancels the coroutine, which then cleans up in
        the loop's thread; `stop` waits for that.
        """
        future = asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of no effect where the exception is the coroutine's own
            raise

    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Let what is unfinished end, run one last coroutine, and end the thread. To be called once."""
        self.run(self._wait_for_unfinished(timeout_s))
        self.run(last)
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        self._running.add(task)
        try:
            return await coroutine
        finally:
            self._running.discard(task)

    async def _wait_for_unfinished(self, timeout_s: float) -> None:
        unfinished = [task for task in self._running if task not in (None, asyncio.current_task())]
        if unfinished:
            await asyncio.wait(unfinished, timeout=timeout_s)
