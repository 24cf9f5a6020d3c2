# SPDX-License-Identifier: Apache-2.0
"""What is on its way to an answer is bounded over all processes, and nothing lost on the way counts for ever."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_triton import answer_line
from kimi_triton.answer_line import LEASE_S, AnswerLine
from kimi_triton.errors import InvalidRequest, Unavailable


@pytest.fixture
def line(tmp_path: Path) -> AnswerLine:
    return AnswerLine(tmp_path / "answers", 2)


def enter(line: AnswerLine, *places: float) -> None:
    for place in places:
        with line.entered(place):
            pass


def test_g9_what_the_language_model_would_refuse_is_refused_before_work_is_done(line: AnswerLine) -> None:
    line.refuse_when_full()
    enter(line, 1.0, 2.0)
    with pytest.raises(Unavailable, match="2 requests"):
        enter(line, 3.0)
    with pytest.raises(Unavailable):
        line.refuse_when_full()
    line.arrive(1.0)
    with pytest.raises(Unavailable):
        enter(line, 3.0)
    line.leave(1.0)
    enter(line, 3.0)
    assert len(line) == 2


def test_an_error_on_the_way_makes_room_again(line: AnswerLine) -> None:
    with pytest.raises(InvalidRequest), line.entered(1.0):
        raise InvalidRequest("image 0: no picture")
    assert len(line) == 0


def test_requests_without_a_place_take_no_part(line: AnswerLine) -> None:
    enter(line, 1.0, 2.0)
    with line.entered(None):
        line.arrive(None)
        line.leave(None)
    assert len(line) == 2


def test_what_was_lost_on_the_way_is_forgotten_but_not_a_long_answer(
    line: AnswerLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(answer_line, "time", SimpleNamespace(monotonic=lambda: now))
    enter(line, 1.0, 2.0)
    line.arrive(1.0)
    now += LEASE_S + 1
    assert len(line) == 1
    line.arrive(2.0)  # late, but there
    assert len(line) == 2
    line.clear()
    assert len(line) == 0
