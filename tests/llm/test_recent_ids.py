# SPDX-License-Identifier: Apache-2.0
"""The memory of request ids."""

from __future__ import annotations

from kimi_triton.llm.recent_ids import REMEMBERED_IDS, RecentIds


def test_f4_the_latest_ids_are_remembered_and_no_more() -> None:
    ids = RecentIds()
    ids.add("often")
    for index in range(REMEMBERED_IDS):
        ids.add(str(index))
        ids.add("often")
    assert "often" in ids
    assert str(REMEMBERED_IDS - 1) in ids
    assert "0" not in ids
    assert sum(str(index) in ids for index in range(REMEMBERED_IDS)) == REMEMBERED_IDS - 1
