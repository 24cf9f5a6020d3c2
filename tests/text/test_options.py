# SPDX-License-Identifier: Apache-2.0
"""Options: what is understood, what is refused, and by which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.errors import ConfigError, InvalidRequest
from kimi_triton.text.options import GenerationOptions


def both_ways(name: str, value: Any) -> list[GenerationOptions]:
    """The option as request parameter and as key of sampling_parameters."""
    return [
        GenerationOptions.from_request({name: value}),
        GenerationOptions.from_request({}, json.dumps({name: value}).encode()),
    ]


def refused(name: str, value: Any) -> str:
    """The message, which must be the same for both ways."""
    messages = []
    for parameters, raw in (({name: value}, None), ({}, json.dumps({name: value}).encode())):
        with pytest.raises(InvalidRequest) as caught:
            GenerationOptions.from_request(parameters, raw)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert name in messages[0]
    return messages[0]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 1, 1),
        ("max_tokens", 2**31, 2**31),
        ("max_tokens", "5", 5),
        ("temperature", 0, 0.0),
        ("temperature", "0.5", 0.5),
        ("temperature", "1e-6", 1e-6),
        ("temperature", 2, 2.0),
        ("top_p", 1, 1.0),
        ("top_p", 1e-9, 1e-9),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", "-1", 0),
        ("min_p", 0.25, 0.25),
        ("repetition_penalty", 2, 2.0),
        ("seed", 0, 0),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("stop", "###", ("###",)),
        ("stream", True, True),
        ("stream", "false", False),
        ("thinking", False, False),
        ("thinking", "True", True),
        ("logprobs", True, True),
    ],
)
def test_values_are_read_from_both_places(name: str, value: Any, expected: Any) -> None:
    for options in both_ways(name, value):
        assert getattr(options, name) == expected
        assert type(getattr(options, name)) is type(expected)


@pytest.mark.parametrize("value", [-1, 0, 1.5, "1.5", 5.0, "", "five", "0x10", True, None, [1]])
def test_h3_max_tokens_that_are_no_positive_integer_are_refused(value: Any) -> None:
    refused("max_tokens", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 0.5),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.5),
    ],
)
def test_h4_values_out_of_range_are_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("value", [-1, 2**63, 10**4000, 0.5, "seed", None])
def test_h5_seeds_that_no_generator_takes_are_refused(value: Any) -> None:
    assert len(refused("seed", value)) < 300


def test_h4_json_nan_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        GenerationOptions.from_request({}, b'{"temperature": NaN}')


@pytest.mark.parametrize("value", [1, 0, "yes", "", None])
def test_booleans_are_not_guessed(value: Any) -> None:
    refused("stream", value)


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a", 1], "x" * 257, ["a"] * 17, {"a": 1}, None, 7])
def test_bad_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(InvalidRequest, match="option stop"):
        GenerationOptions.from_request({}, json.dumps({"stop": stop}).encode())


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('["a", "b"]', ("a", "b")),
        ("[]", ()),
        ("[1]", ("[1]",)),
        ("[DONE]", ("[DONE]",)),
        ("\n", ("\n",)),
        ("[" * 200, ("[" * 200,)),
    ],
)
def test_g8_a_list_of_stop_strings_travels_as_json_in_a_string(written: str, expected: tuple[str, ...]) -> None:
    assert GenerationOptions.from_request({"stop": written}).stop == expected


def test_g8_a_stop_list_in_sampling_parameters() -> None:
    options = GenerationOptions.from_request({}, b'{"stop": ["a", "[1]"]}')
    assert options.stop == ("a", "[1]")


def test_the_same_value_in_both_places_is_fine() -> None:
    assert GenerationOptions.from_request({"temperature": "0.5"}, b'{"temperature": 0.5}').temperature == 0.5


def test_two_values_for_one_option_are_refused_with_both() -> None:
    with pytest.raises(InvalidRequest, match=r"top_k is 5 .* 6 in sampling_parameters"):
        GenerationOptions.from_request({"top_k": 5}, b'{"top_k": 6}')


def test_options_of_both_places_add_up() -> None:
    options = GenerationOptions.from_request({"top_k": 5, "stream": True}, b'{"seed": 6}')
    assert options == GenerationOptions(top_k=5, stream=True, seed=6)


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="unknown request parameter 'max_token'; known are max_tokens"):
        GenerationOptions.from_request({"max_token": 5})
    with pytest.raises(InvalidRequest, match="unknown key of sampling_parameters 'best_of'"):
        GenerationOptions.from_request({}, b'{"best_of": 2}')


def test_triton_s_own_parameters_pass() -> None:
    tritons: dict[str, Any] = {
        "id": "r7",
        "sequence_id": 1,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 2,
        "timeout": 1000,
        "headers": "x",
        "binary_data_output": True,
        "triton_enable_empty_final_response": True,
    }
    assert GenerationOptions.from_request(tritons) == GenerationOptions()


@pytest.mark.parametrize("raw", [b"[1]", b"7", b"{", b"\xff", b"[" * 10_000, b'{"seed": ' + b"1" * 10_000 + b"}"])
def test_g2_sampling_parameters_that_are_no_json_object_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="sampling_parameters"):
        GenerationOptions.from_request({}, raw)


def test_g2_sampling_parameters_have_a_size_limit() -> None:
    with pytest.raises(InvalidRequest, match="1048577 bytes, the limit is 1048576"):
        GenerationOptions.from_request({}, b" " * (2**20 + 1))


def test_empty_sampling_parameters_mean_none() -> None:
    assert GenerationOptions.from_request({}, b"") == GenerationOptions()


some_options = st.builds(
    GenerationOptions,
    max_tokens=st.integers(1, 2**40),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 2, exclude_min=True),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=256), max_size=16).map(tuple),
    stream=st.booleans(),
    thinking=st.none() | st.booleans(),
    logprobs=st.booleans(),
)


@given(some_options)
def test_json_between_the_steps_loses_nothing(options: GenerationOptions) -> None:
    assert GenerationOptions.from_json(options.to_json()) == options


def test_json_from_a_direct_caller_is_checked() -> None:
    with pytest.raises(InvalidRequest, match="generation is no JSON"):
        GenerationOptions.from_json(b"")
    with pytest.raises(InvalidRequest, match="unknown key of generation 'x'"):
        GenerationOptions.from_json(b'{"x": 1}')
    with pytest.raises(InvalidRequest, match="top_p"):
        GenerationOptions.from_json(b'{"top_p": 7}')


def test_checkpoint_brings_defaults_and_the_request_wins(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": None, "max_length": 10, "eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    defaults = GenerationOptions.from_checkpoint(tmp_path)
    assert defaults == GenerationOptions(temperature=0.6, top_p=0.95)
    chosen = GenerationOptions.from_request({"temperature": 0}, None, defaults)
    assert chosen == GenerationOptions(temperature=0, top_p=0.95)


def test_checkpoint_that_asks_for_greedy_gets_it(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "max_new_tokens": 9}')
    assert GenerationOptions.from_checkpoint(tmp_path) == GenerationOptions(temperature=0, max_tokens=9)


def test_checkpoint_without_generation_config_has_our_defaults(tmp_path: Path) -> None:
    assert GenerationOptions.from_checkpoint(tmp_path) == GenerationOptions()


def test_checkpoint_with_impossible_defaults_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 3}')
    with pytest.raises(ConfigError, match=r"generation_config\.json.*top_p"):
        GenerationOptions.from_checkpoint(tmp_path)
