# SPDX-License-Identifier: Apache-2.0
"""Which request ids have come lately: a cancellation of one that is over must not wait for the next one of its name."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED_IDS = 4096


class RecentIds:
    """The last few thousand ids."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, request_id: str) -> None:
        self._ids[request_id] = None
        self._ids.move_to_end(request_id)
        if len(self._ids) > REMEMBERED_IDS:
            self._ids.popitem(last=False)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids
