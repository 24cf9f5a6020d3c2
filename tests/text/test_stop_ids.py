# SPDX-License-Identifier: Apache-2.0
"""The stop set is a union, so that no source of it can be forgotten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_triton.config import CheckpointConfig
from kimi_triton.errors import ConfigError
from kimi_triton.text.stop_ids import stop_token_ids
from kimi_triton.text.tokenizer import KimiTokenizer

Build = Callable[..., tuple[frozenset[int], KimiTokenizer]]


@pytest.fixture
def build(tiny_k25: Path, tmp_path: Path) -> Build:
    """Stop ids of a checkpoint whose three sources hold the given eos_token_id values."""

    def build(
        top: object = None, text: object = None, generation: object = None
    ) -> tuple[frozenset[int], KimiTokenizer]:
        for name in ("tiktoken.model", "tokenizer_config.json"):
            shutil.copy(tiny_k25 / name, tmp_path)
        config = json.loads((tiny_k25 / "config.json").read_text())
        config["eos_token_id"], config["text_config"]["eos_token_id"] = top, text
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        parsed = CheckpointConfig.from_checkpoint(tmp_path)
        tokenizer = KimiTokenizer.from_checkpoint(tmp_path, parsed)
        return stop_token_ids(tmp_path, parsed, tokenizer), tokenizer

    return build


def test_h1_turn_end_stops_even_if_no_file_says_so(build: Build) -> None:
    stop_ids, tokenizer = build()
    assert stop_ids == {tokenizer.special("[EOS]"), tokenizer.special("<|im_end|>")}


@pytest.mark.parametrize("generation", [5, [5], [5, 6]])
def test_h1_stop_set_is_the_union_of_all_sources(build: Build, generation: object) -> None:
    stop_ids, tokenizer = build(top=3, text=[4], generation=generation)
    always = {tokenizer.special("[EOS]"), tokenizer.special("<|im_end|>")}
    assert stop_ids == always | {3, 4} | ({5, 6} if generation == [5, 6] else {5})


@pytest.mark.parametrize("wrong", [163586, "<|im_end|>", -1])
def test_h1_stop_id_outside_the_vocabulary_is_refused(build: Build, wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"eos_token_id"):
        build(generation=[wrong])
