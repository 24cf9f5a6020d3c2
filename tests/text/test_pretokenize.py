# SPDX-License-Identifier: Apache-2.0
"""The two cutting rules, against a character-by-character reading of them."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.text import pretokenize
from kimi_triton.text.pretokenize import cut


def cut_slowly(text: str, max_piece: int, max_run: int) -> list[str]:
    """Walk over the characters and count how long the present run of spaces or of non-spaces is."""
    pieces: list[str] = []
    for start in range(0, len(text), max_piece):
        current, run = "", 0
        for character in text[start : start + max_piece]:
            run = run + 1 if current and current[-1].isspace() == character.isspace() else 1
            if run > max_run:
                pieces.append(current)
                current, run = "", 1
            current += character
        pieces.append(current)
    return pieces


@given(st.text(st.sampled_from("ab \n\u3000中"), max_size=200))
def test_cuts_equal_a_walk_over_the_characters(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretokenize, "MAX_PIECE_CHARS", 40)
        patch.setattr(pretokenize, "MAX_RUN_CHARS", 5)
        assert list(cut(text)) == cut_slowly(text, 40, 5)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("", []),
        ("a" * 25_000, [25_000]),
        ("a" * 25_001, [25_000, 1]),
        (" " * 60_000, [25_000, 25_000, 10_000]),
        ("a" * 24_999 + " " + "b" * 25_001, [50_000, 1]),
        ("ab " * 200_000, [400_000, 200_000]),
    ],
)
def test_released_limits(text: str, lengths: list[int]) -> None:
    pieces = list(cut(text))
    assert [len(piece) for piece in pieces] == lengths
    assert "".join(pieces) == text


def test_white_space_is_what_str_isspace_calls_so() -> None:
    characters = [chr(code) for code in range(sys.maxunicode + 1)]
    assert all((pretokenize._RUN.fullmatch("a" + c) is None) == c.isspace() for c in characters)
