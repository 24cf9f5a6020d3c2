# SPDX-License-Identifier: Apache-2.0
"""What stands behind the model `kimi_cancel`: posts a cancellation at once, answers when a step met the request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kimi_triton.cancel_board import CancelBoard
from kimi_triton.errors import InvalidRequest

logger = logging.getLogger(__name__)

ANSWER_WITHIN_S = 0.25
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class _Waiting:
    request_id: str
    answer: Callable[[bool], None]
    deadline: float


class CancelDesk:
    """Hundreds of callers may wait at once; one thread looks after all of them."""

    def __init__(self, board: CancelBoard) -> None:
        self._board = board
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="cancel-desk", daemon=True)
        self._thread.start()

    def submit(self, request_id: bytes, answer: Callable[[bool], None]) -> None:
        """Cancel a request. `answer` is called once, from another thread, with true when the request was stopped.

        It gets false when that request had ended, was never seen, or is still in a queue, where it will be refused.
        Raises InvalidRequest, and then never calls `answer`.
        """
        name = request_id.decode(errors="surrogateescape")
        if not name:
            raise InvalidRequest("request_id is empty; a request without an id cannot be cancelled")
        self._board.post(name)
        with self._changed:
            self._waiting.append(_Waiting(name, answer, time.monotonic() + ANSWER_WITHIN_S))
            self._changed.notify()

    def stop(self) -> None:
        """Answer all who wait and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._stopping):
                    self._changed.wait()
                if self._stopping and not self._waiting:
                    return
                waiting, self._waiting = self._waiting, []
                stopping = self._stopping
            unanswered = [one for one in waiting if not self._answer(one, give_up=stopping)]
            with self._changed:
                self._waiting += unanswered
            time.sleep(POLL_S)

    def _answer(self, waiting: _Waiting, give_up: bool) -> bool:
        outcome = self._board.outcome(waiting.request_id)
        if outcome is None and not give_up and time.monotonic() < waiting.deadline:
            return False
        try:
            waiting.answer(bool(outcome))
        except Exception:
            logger.exception("whoever cancelled request %s could not be told", waiting.request_id)
        return True
