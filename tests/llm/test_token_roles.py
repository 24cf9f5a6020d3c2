# SPDX-License-Identifier: Apache-2.0
"""What control tokens mean in an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kimi_triton.config import CheckpointConfig
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.text.tokenizer import KimiTokenizer


def roles_of(folder: Path) -> tuple[KimiTokenizer, TokenRoles]:
    config = CheckpointConfig.from_checkpoint(folder)
    tokenizer = KimiTokenizer.from_checkpoint(folder, config)
    return tokenizer, TokenRoles.from_checkpoint(folder, config, tokenizer)


@pytest.mark.parametrize("family", ["tiny_k25", "tiny_vl"])
def test_media_turns_and_unnamed_slots_are_never_sampled(family: str, request: pytest.FixtureRequest) -> None:
    tokenizer, roles = roles_of(request.getfixturevalue(family))
    for name in ("<|media_pad|>", "<|media_content|>", "<|media_end|>", "<|im_user|>", "[BOS]", "[PAD]", "[UNK]"):
        assert tokenizer.special(name) in roles.blocked
    unnamed = [token_id for token_id in tokenizer.control_ids if b"reserved" in tokenizer.decode_bytes([token_id])]
    assert len(unnamed) > 200
    assert roles.blocked.issuperset(unnamed)
    assert not any(token_id < tokenizer.control_ids.start for token_id in roles.blocked)


@pytest.mark.parametrize("family", ["tiny_k25", "tiny_vl"])
def test_h1_end_of_turn_and_end_of_text_can_be_sampled_and_stop(family: str, request: pytest.FixtureRequest) -> None:
    tokenizer, roles = roles_of(request.getfixturevalue(family))
    assert roles.stop == {tokenizer.special("[EOS]"), tokenizer.special("<|im_end|>")}
    assert not roles.stop & roles.blocked


def test_thinking_and_tool_tokens_of_k25_can_be_sampled(tiny_k25: Path) -> None:
    tokenizer, roles = roles_of(tiny_k25)
    assert (roles.think_start, roles.think_end) == (tokenizer.special("<think>"), tokenizer.special("</think>"))
    assert tokenizer.special("<|tool_call_begin|>") in roles.shown
    assert not roles.blocked & (roles.shown | {roles.think_start, roles.think_end})


def test_a_prompt_with_an_open_thought_starts_in_reasoning(tiny_k25: Path, tiny_vl: Path) -> None:
    _, roles = roles_of(tiny_k25)
    opened, closed = roles.think_start, roles.think_end
    for ids, expected in (
        ([1, opened], True),
        ([1, opened, 5, 6], True),
        ([opened, closed, 1, opened], True),
        ([1, opened, closed], False),
        ([1, 2], False),
        ([closed, 1], False),
    ):
        assert roles.in_reasoning(np.array(ids)) is expected
    assert not roles_of(tiny_vl)[1].in_reasoning(np.array([1, 2]))
