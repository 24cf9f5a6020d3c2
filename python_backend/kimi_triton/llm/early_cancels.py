# SPDX-License-Identifier: Apache-2.0
"""Cancellations that overtake their request: it may still be on its way through the steps before this one."""

from __future__ import annotations

import time
from collections import OrderedDict

REMEMBERED_IDS = 4096
REMEMBERED_S = 120.0


class EarlyCancels:
    """Ids that were cancelled before they came; forgotten after two minutes.

    Ids that came already are remembered too: a cancellation that is late must not hit the next request of that id.
    """

    def __init__(self) -> None:
        self._cancelled: OrderedDict[str, float] = OrderedDict()  # id -> time.monotonic() of the cancellation
        self._arrived: OrderedDict[str, None] = OrderedDict()

    def cancel(self, request_id: str) -> None:
        """Note a cancellation for a request that is not live."""
        if request_id not in self._arrived:
            self._cancelled[request_id] = time.monotonic()
            _forget_oldest(self._cancelled)

    def has_arrived(self, request_id: str) -> bool:
        """Whether a request of this id is known to have come, be it live or over."""
        return request_id in self._arrived

    def arrive(self, request_id: str) -> bool:
        """Note that a request has come; true when it was cancelled before."""
        self._arrived[request_id] = None
        self._arrived.move_to_end(request_id)
        _forget_oldest(self._arrived)
        cancelled_at = self._cancelled.pop(request_id, None)
        return cancelled_at is not None and time.monotonic() - cancelled_at < REMEMBERED_S


def _forget_oldest(ids: OrderedDict[str, float] | OrderedDict[str, None]) -> None:
    while len(ids) > REMEMBERED_IDS:
        ids.popitem(last=False)
