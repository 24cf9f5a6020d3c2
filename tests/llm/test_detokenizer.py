# SPDX-License-Identifier: Apache-2.0
"""Characters that are cut by tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.llm.detokenizer import Detokenizer

FAMILY = "👨‍👩‍👧‍👦"


def decode(chunks: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(lambda ids: b"".join(chunks[index] for index in ids))
    return [detokenizer.push(index) for index in range(len(chunks))] + [detokenizer.finish()]


@given(st.text(), st.lists(st.integers(1, 5)))
def test_h2_pieces_join_to_the_text_wherever_it_is_cut(text: str, sizes: list[int]) -> None:
    data, chunks = text.encode(errors="ignore"), []
    for size in sizes:
        chunks.append(data[:size])
        data = data[size:]
    pieces = decode([*chunks, data])
    assert "".join(pieces) == text.encode(errors="ignore").decode()
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(st.binary(max_size=40))
def test_h2_any_bytes_give_what_decoding_them_at_once_gives(data: bytes) -> None:
    assert "".join(decode([bytes([value]) for value in data])) == data.decode(errors="replace")


@pytest.mark.parametrize("text", [FAMILY, "图片描述", "e\u0301", "नमस्ते"])
def test_h2_single_bytes_never_show_half_a_character(text: str) -> None:
    pieces = decode([bytes([value]) for value in text.encode()])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_h2_an_end_inside_a_character_shows_one_replacement() -> None:
    assert decode([b"a", FAMILY.encode()[:3]]) == ["a", "", "\ufffd"]


def test_h2_invalid_bytes_for_ever_are_not_held_for_ever() -> None:
    pieces = decode([b"\xe5"] * 100)
    assert all(len(piece) == 1 for piece in pieces[1:-1])


def test_finishing_twice_adds_nothing() -> None:
    detokenizer = Detokenizer(lambda _: b"\xe5")
    detokenizer.push(0)
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""]
