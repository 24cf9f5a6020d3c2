# SPDX-License-Identifier: Apache-2.0
"""What is between the steps is bounded over all processes, and nothing lost on the way counts for ever."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kimi_triton import pixel_budget
from kimi_triton.errors import Unavailable
from kimi_triton.pixel_budget import LEASE_S, ROWS, PixelBudget


def digest(number: int, rows: int = 1) -> Any:
    return np.full((rows, 32), number % 256, np.uint8)


@pytest.fixture
def budget(tmp_path: Path) -> PixelBudget:
    return PixelBudget(tmp_path / "pixels", 1000)


def test_g9_what_does_not_fit_is_refused_until_something_leaves(budget: PixelBudget) -> None:
    budget.enter(digest(1), 600)
    with pytest.raises(Unavailable, match=r"600 bytes .* the limit is 1000"):
        budget.enter(digest(2), 500)
    budget.enter(digest(3), 400)
    with pytest.raises(Unavailable):
        budget.refuse_when_full()
    budget.leave(digest(1))
    budget.refuse_when_full()
    budget.enter(digest(2), 500)
    assert budget.used_bytes() == 900


def test_one_request_above_the_whole_budget_goes_alone(budget: PixelBudget) -> None:
    budget.enter(digest(1), 5000)
    with pytest.raises(Unavailable):
        budget.enter(digest(2), 1)
    budget.leave(digest(1))
    budget.enter(digest(2), 1)


def test_text_only_requests_take_no_part(budget: PixelBudget) -> None:
    budget.enter(digest(1), 1000)
    budget.enter(digest(2, rows=0), 0)
    budget.leave(digest(2, rows=0))
    assert budget.used_bytes() == 1000


def test_equal_images_of_several_requests_leave_one_by_one(budget: PixelBudget) -> None:
    budget.enter(digest(1), 300)
    budget.enter(digest(1), 300)
    budget.leave(digest(1))
    assert budget.used_bytes() == 300
    budget.leave(digest(1))
    budget.leave(digest(1))
    assert budget.used_bytes() == 0


def test_what_was_lost_on_the_way_is_forgotten(budget: PixelBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pixel_budget, "time", SimpleNamespace(monotonic=lambda: now))
    budget.enter(digest(1), 1000)
    now += LEASE_S + 1
    budget.enter(digest(2), 1000)
    assert budget.used_bytes() == 1000
    budget.clear()
    assert budget.used_bytes() == 0


def test_a_full_table_refuses_too(tmp_path: Path) -> None:
    budget = PixelBudget(tmp_path / "pixels", 10**9)
    for number in range(ROWS):
        budget.enter(digest(number), 1)
    with pytest.raises(Unavailable):
        budget.enter(digest(1), 1)
