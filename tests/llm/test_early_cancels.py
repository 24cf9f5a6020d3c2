# SPDX-License-Identifier: Apache-2.0
"""Cancellations that come before their request."""

from __future__ import annotations

import pytest

from kimi_triton.llm import early_cancels
from kimi_triton.llm.early_cancels import EarlyCancels


def test_a_request_that_comes_after_its_cancellation_is_cancelled_once() -> None:
    cancels = EarlyCancels()
    cancels.cancel("a")
    assert not cancels.arrive("b")
    assert cancels.arrive("a")
    assert not cancels.arrive("a")


def test_a_late_cancellation_does_not_hit_the_next_request_of_its_id() -> None:
    cancels = EarlyCancels()
    assert not cancels.arrive("1")
    cancels.cancel("1")
    assert not cancels.arrive("1")


def test_cancellations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cancels = EarlyCancels()
    cancels.cancel("a")
    monkeypatch.setattr(early_cancels, "REMEMBERED_S", 0.0)
    assert not cancels.arrive("a")


def test_f4_memory_is_bounded() -> None:
    cancels = EarlyCancels()
    for index in range(3 * early_cancels.REMEMBERED_IDS):
        cancels.cancel(f"cancelled {index}")
        cancels.arrive(f"arrived {index}")
    assert len(cancels._cancelled) == early_cancels.REMEMBERED_IDS
    assert len(cancels._arrived) == early_cancels.REMEMBERED_IDS
    assert cancels.arrive(f"cancelled {3 * early_cancels.REMEMBERED_IDS - 1}")
