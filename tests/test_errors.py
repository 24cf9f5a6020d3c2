# SPDX-License-Identifier: Apache-2.0
"""Errors survive a way that carries only their text."""

from __future__ import annotations

import pytest

from kimi_triton.errors import Cancelled, InvalidRequest, KimiError, Unavailable, error_from_text, error_text


@pytest.mark.parametrize("error_class", [KimiError, InvalidRequest, Unavailable, Cancelled])
@pytest.mark.parametrize("prefix", ["", "in ensemble 'kimi_vl', "])
def test_an_error_is_the_same_after_travelling_as_text(error_class: type[KimiError], prefix: str) -> None:
    read = error_from_text(prefix + error_text(error_class("image 1: too small")))
    assert type(read) is error_class
    assert str(read) == "image 1: too small"


def test_words_of_another_kind_inside_a_message_do_not_change_its_kind() -> None:
    assert type(error_from_text("unknown option 'cancelled: internal error: '")) is InvalidRequest


@pytest.mark.parametrize(
    ("text", "error_class"),
    [
        ("in ensemble 'kimi_vl', [request id: 7] Exceeds maximum queue size", Unavailable),
        ("Request for unknown model: 'x' has no available versions, is not at ready state", Unavailable),
        ("in ensemble 'kimi_vl', Stub process 'llm_0_0' is not healthy.", Unavailable),
        ("in ensemble 'kimi_vl', Failed to process the request(s) for model instance 'llm_0_0'", KimiError),
    ],
)
def test_tritons_own_messages_find_their_kind(text: str, error_class: type[KimiError]) -> None:
    assert type(error_from_text(text)) is error_class
