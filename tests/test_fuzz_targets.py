# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer's targets: valid files and texts, damaged in every way hypothesis thinks of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz_targets import TARGETS, image, messages, options

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "root"])
FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_accepted_or_refused_properly(name: str) -> None:
    function, seeds = TARGETS[name]
    for seed in seeds():
        function(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_a2_a5_damaged_input_is_refused_or_read_never_a_crash(name: str) -> None:
    function, seeds = TARGETS[name]
    source = random.Random(1)
    for seed in seeds():
        for _ in range(8):
            function(damaged(seed, source))


def damaged(data: bytes, source: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled, or the end cut off."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 6)):
        place = source.randrange(len(changed) + 1)
        kind = source.randrange(4)
        if kind == 0 and place < len(changed):
            changed[place] = source.choice([0, 1, 127, 128, 255, source.randrange(256)])
        elif kind == 1:
            del changed[place : place + source.randint(1, 8)]
        elif kind == 2:
            changed[place:place] = changed[place : place + source.randint(1, 16)]
        elif source.random() < 0.2:
            del changed[place:]
    return bytes(changed)


@FAST
@given(JSON)
def test_any_json_as_options(value: Any) -> None:
    options(json.dumps(value).encode())


@FAST
@given(st.lists(st.fixed_dictionaries({"role": ROLES, "content": JSON}, optional={"tool_calls": JSON, "name": JSON})))
def test_any_content_of_messages(value: Any) -> None:
    messages(json.dumps(value).encode())


@FAST
@given(st.binary(max_size=300), st.sampled_from([image, messages, options]))
def test_any_bytes(data: bytes, function: Callable[[bytes], None]) -> None:
    function(data)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"role":"user","content":['])
@pytest.mark.parametrize("depth", [100, 100_000])
def test_g2_deep_json_is_refused(opening: bytes, depth: int) -> None:
    messages(opening * depth)
    options(opening * depth)


def test_a_huge_list_of_options_is_refused() -> None:
    options(json.dumps({f"option{number}": number for number in range(50_000)}).encode())
    options(json.dumps({"stop": ["x"] * 100_000}).encode())
