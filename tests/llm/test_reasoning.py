# SPDX-License-Identifier: Apache-2.0
"""Reasoning that is marked in plain text."""

from __future__ import annotations

import pytest

from kimi_triton.llm.reasoning import MarkedReasoning


def split(pieces: list[str]) -> tuple[str, str]:
    marked = MarkedReasoning()
    parts = [marked.push(piece) for piece in pieces] + [marked.finish()]
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts)


@pytest.mark.parametrize(
    ("text", "answer", "reasoning"),
    [
        ("◁think▷It is a cat.◁/think▷A cat.", "A cat.", "It is a cat."),
        (" \n◁think▷why◁/think▷", "", "why"),
        ("◁think▷cut off", "", "cut off"),
        ("◁think▷a◁/thi", "", "a◁/thi"),
        ("A cat.", "A cat.", ""),
        ("◁thin air", "◁thin air", ""),
        ("◁th", "◁th", ""),
        ("  two spaces", "  two spaces", ""),
        ("Say ◁think▷ and ◁/think▷.", "Say ◁think▷ and ◁/think▷.", ""),
        ("◁think▷a◁/think▷b◁think▷c", "b◁think▷c", "a"),
        ("", "", ""),
    ],
)
def test_answer_and_reasoning_are_told_apart_however_they_are_cut(text: str, answer: str, reasoning: str) -> None:
    assert split([text]) == (answer, reasoning)
    assert split(list(text)) == (answer, reasoning)
    assert split([text[start : start + 3] for start in range(0, len(text), 3)]) == (answer, reasoning)


def test_an_ordinary_answer_is_shown_at_once() -> None:
    marked = MarkedReasoning()
    assert marked.push("A").text == "A"
    assert marked.push(" cat").text == " cat"


def test_nothing_of_a_marker_is_shown() -> None:
    marked = MarkedReasoning()
    parts = [marked.push(character) for character in "◁think▷ab◁/think▷cd"]
    assert [part.text for part in parts if part.text] == ["c", "d"]
    assert [part.reasoning for part in parts if part.reasoning] == ["a", "b"]
