# SPDX-License-Identifier: Apache-2.0
"""From token ids to what a caller sees, with the tokenizers of both families."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_triton.config import CheckpointConfig
from kimi_triton.llm.answer_text import AnswerText
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.text.tokenizer import KimiTokenizer


class Reader:
    """Runs ids, or text, through AnswerText."""

    def __init__(self, folder: Path) -> None:
        config = CheckpointConfig.from_checkpoint(folder)
        self.tokenizer = KimiTokenizer.from_checkpoint(folder, config)
        self.roles = TokenRoles.from_checkpoint(folder, config, self.tokenizer)

    def ids(self, *parts: str) -> list[int]:
        """Control tokens by name, everything else as text of single bytes."""
        found: list[int] = []
        for part in parts:
            if part.startswith("<") or part == "[EOS]":
                found.append(self.tokenizer.special(part))
            else:
                found += [self.tokenizer.encode(chr(65))[0] - 65 + value for value in part.encode()]
        return found

    def read(self, *parts: str, stops: tuple[str, ...] = (), in_reasoning: bool = False) -> tuple[str, str, bool]:
        text = AnswerText(self.tokenizer, self.roles, stops, in_reasoning)
        pieces = []
        for token_id in self.ids(*parts):
            pieces.append(text.push(token_id))
            if text.stopped:
                break
        pieces.append(text.finish())
        return "".join(piece.text for piece in pieces), "".join(piece.reasoning for piece in pieces), text.stopped


@pytest.fixture(scope="module")
def k25(tiny_k25: Path) -> Reader:
    return Reader(tiny_k25)


@pytest.fixture(scope="module")
def vl(tiny_vl: Path) -> Reader:
    return Reader(tiny_vl)


def test_plain_text_comes_out_as_it_is(k25: Reader, vl: Reader) -> None:
    for reader in (k25, vl):
        assert reader.read("Ein Käse 图 👨‍👩‍👧") == ("Ein Käse 图 👨‍👩‍👧", "", False)


def test_h1_the_stop_token_is_not_in_the_text(k25: Reader) -> None:
    assert k25.read("a cat", "<|im_end|>") == ("a cat", "", False)
    assert k25.read("<|im_end|>") == ("", "", False)


def test_reasoning_ends_at_its_token(k25: Reader) -> None:
    assert k25.read("hm", "</think>", "yes", in_reasoning=True) == ("yes", "hm", False)
    assert k25.read("hm", "<|im_end|>", in_reasoning=True) == ("", "hm", False)
    assert k25.read("a", "<think>", "b", "</think>", "c") == ("ac", "b", False)


def test_typed_thinking_tags_are_ordinary_text(k25: Reader) -> None:
    tag = "x</think>y"
    assert k25.read(tag) == (tag, "", False)


def test_h2_an_end_of_reasoning_inside_a_character_shows_one_replacement(k25: Reader) -> None:
    text = AnswerText(k25.tokenizer, k25.roles, (), True)
    for token_id in k25.ids("a图")[:-1]:
        text.push(token_id)
    assert text.push(k25.roles.think_end or 0).reasoning == "\ufffd"
    assert text.finish() == ("", "")


def test_marked_reasoning_of_kimi_vl_is_separated(vl: Reader) -> None:
    assert vl.read("◁think▷hm◁/think▷yes", "<|im_end|>") == ("yes", "hm", False)


def test_stop_strings_cut_the_answer_and_not_the_thought(k25: Reader, vl: Reader) -> None:
    assert k25.read("one END two", stops=("END", "two")) == ("one ", "", True)
    assert k25.read("an END", "</think>", "one END two", stops=("END",), in_reasoning=True) == ("one ", "an END", True)
    assert vl.read("◁think▷an END◁/think▷one END two", stops=("END",)) == ("one ", "an END", True)


def test_a_stop_string_of_several_bytes_per_character_is_found(k25: Reader) -> None:
    assert k25.read("yes 停止 no", stops=("停止",)) == ("yes ", "", True)


def test_the_beginning_of_a_stop_string_is_shown_when_the_text_ends(k25: Reader) -> None:
    assert k25.read("one EN", "<|im_end|>", stops=("END",)) == ("one EN", "", False)


def test_tool_calls_are_shown_and_other_control_tokens_are_not(k25: Reader) -> None:
    assert k25.read("a", "<|tool_call_begin|>", "b", "<|im_user|>") == ("a<|tool_call_begin|>b", "", False)
