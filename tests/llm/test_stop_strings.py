# SPDX-License-Identifier: Apache-2.0
"""Stop strings in a stream, against cutting the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.llm.stop_strings import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    stop_strings = StopStrings(stops)
    text = ""
    for piece in pieces:
        text += stop_strings.push(piece)
    return text + stop_strings.finish(), stop_strings.found


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The shortest beginning of `text` that ends with a stop string, without it."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(TEXT, STOPS, st.lists(st.integers(0, 3)))
def test_pieces_do_not_matter(text: str, stops: list[str], sizes: list[int]) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert shown([*pieces, rest], stops) == cut(text, stops)


@given(TEXT, STOPS)
def test_nothing_of_a_stop_string_leaks_while_streaming(text: str, stops: list[str]) -> None:
    stop_strings, seen = StopStrings(stops), ""
    for character in text:
        seen += stop_strings.push(character)
        assert cut(text, stops)[0].startswith(seen)


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    stop_strings = StopStrings(["STOP"])
    assert [stop_strings.push(piece) for piece in ("hello ", "ST", "ART ", "STO", "P now")] == [
        "hello ",
        "",
        "START ",
        "",
        "",
    ]
    assert stop_strings.found
    assert stop_strings.rest == " now"
    assert stop_strings.push("more") == ""


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings(()).push("anything") == "anything"
