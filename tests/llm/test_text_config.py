# SPDX-License-Identifier: Apache-2.0
"""What of a text_config is taken over, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_triton.errors import ConfigError
from kimi_triton.llm.text_config import deepseek_config


@pytest.fixture
def text(tiny_k25: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((tiny_k25 / "config.json").read_text())["text_config"]
    return config


def test_values_of_the_file_are_used(text: dict[str, Any]) -> None:
    config = deepseek_config(text | {"routed_scaling_factor": 3.5, "rms_norm_eps": 2e-5})
    assert config.routed_scaling_factor == 3.5
    assert config.rms_norm_eps == 2e-5
    assert config.rope_parameters["rope_theta"] == text["rope_theta"]
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["factor"] == 4.0


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"])
def test_both_names_of_the_text_model_are_one(text: dict[str, Any], model_type: str) -> None:
    assert deepseek_config(text | {"model_type": model_type}).model_type == "deepseek_v3"


def test_without_rope_scaling_there_is_no_yarn(text: dict[str, Any]) -> None:
    assert deepseek_config(text | {"rope_scaling": None}).rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topk_method", "greedy"),
        ("scoring_func", "softmax"),
        ("hidden_act", "gelu"),
        ("moe_layer_freq", 2),
        ("attention_bias", True),
        ("rope_interleave", False),
    ],
)
def test_what_transformers_would_ignore_is_refused(text: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"text_config.{field} is {value!r}"):
        deepseek_config(text | {field: value})


@pytest.mark.parametrize("field", ["n_group", "rope_theta", "routed_scaling_factor", "num_experts_per_tok"])
def test_j1_a_missing_value_is_named_and_not_guessed(text: dict[str, Any], field: str) -> None:
    del text[field]
    with pytest.raises(ConfigError, match=f"text_config.{field} is missing"):
        deepseek_config(text)


def test_other_rope_scalings_are_refused(text: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="of type 'dynamic'"):
        deepseek_config(text | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})


def test_a_value_of_the_wrong_type_is_refused(text: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        deepseek_config(text | {"kv_lora_rank": "many"})
