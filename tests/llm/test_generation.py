# SPDX-License-Identifier: Apache-2.0
"""Which responses a caller gets for tokens that come one by one or together."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_triton.config import CheckpointConfig
from kimi_triton.llm.answer_text import AnswerText
from kimi_triton.llm.engine import Token
from kimi_triton.llm.generation import Generation
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.text.tokenizer import KimiTokenizer
from tests.llm.scripted import RecordingCaller

EURO = "€".encode()  # three bytes, a token each


@pytest.fixture(scope="module")
def tokenizer(tiny_k25: Path) -> KimiTokenizer:
    return KimiTokenizer.from_checkpoint(tiny_k25, CheckpointConfig.from_checkpoint(tiny_k25))


@pytest.fixture(scope="module")
def roles(tiny_k25: Path, tokenizer: KimiTokenizer) -> TokenRoles:
    return TokenRoles.from_checkpoint(tiny_k25, CheckpointConfig.from_checkpoint(tiny_k25), tokenizer)


def answered(
    tokenizer: KimiTokenizer, roles: TokenRoles, *groups: bytes, stream: bool = True, stops: tuple[str, ...] = ()
) -> RecordingCaller:
    """A caller whose answer came in groups of single-byte tokens and then ended."""
    caller = RecordingCaller()
    text = AnswerText(tokenizer, roles, stops, in_reasoning=False)
    generation = Generation(caller, text, stream=stream, logprobs=False, prompt_tokens=3, cached_images=0)
    for group in groups:
        for place, byte in enumerate(group):
            if not generation.on_token(Token(byte), more=place + 1 < len(group)):
                return caller
    generation.on_end("length")
    return caller


def texts(caller: RecordingCaller) -> list[str]:
    return [answer.text for answer in caller.answers]


def test_tokens_that_come_together_are_one_response(tokenizer: KimiTokenizer, roles: TokenRoles) -> None:
    caller = answered(tokenizer, roles, b"a", b"bcd", b"e")
    assert texts(caller) == ["a", "bcd", "e", ""]
    assert [answer.completion_tokens for answer in caller.answers] == [1, 4, 5, 5]
    assert [len(answer.token_ids) for answer in caller.answers] == [1, 3, 1, 0]


def test_a_group_that_ends_inside_a_character_shows_what_is_whole(tokenizer: KimiTokenizer, roles: TokenRoles) -> None:
    assert texts(answered(tokenizer, roles, b"a" + EURO[:2], EURO[2:] + b"b")) == ["a", "€b", ""]


def test_a_stop_string_inside_a_group_ends_the_answer_there(tokenizer: KimiTokenizer, roles: TokenRoles) -> None:
    caller = answered(tokenizer, roles, b"ab", b"cXYd", stops=("XY",))
    assert texts(caller) == ["ab", "c"]
    assert caller.answers[-1].finish_reason == "stop"
    assert caller.answers[-1].completion_tokens == 5


def test_a_stop_string_across_groups_never_shows(tokenizer: KimiTokenizer, roles: TokenRoles) -> None:
    assert texts(answered(tokenizer, roles, b"abX", b"Yd", stops=("XY",))) == ["ab", ""]


def test_an_answer_that_is_not_streamed_is_one_response(tokenizer: KimiTokenizer, roles: TokenRoles) -> None:
    assert texts(answered(tokenizer, roles, b"ab", b"cd", stream=False)) == ["abcd"]
