# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in which the words of the prompt grammar and two newlines are one token, as in the released one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_triton.config import CheckpointConfig, Family
from kimi_triton.demo.tiny import write_tokenizer
from kimi_triton.text.tokenizer import KimiTokenizer

WORDS = [b"user", b"system", b"assistant", b"image", b"video", b"tool", b"\n\n"]
CONTROL = re.compile(r"(<\|[a-z_0-9]+\|>|</?think>|\[EOS\])")


def _tokenizer(family: Family, tiny: Path, folder: Path) -> KimiTokenizer:
    first_special = write_tokenizer(folder, family, WORDS)
    config = json.loads((tiny / "config.json").read_text())
    config["text_config"]["vocab_size"] = first_special + 256
    config["media_placeholder_token_id"] = first_special + 21
    config.pop("image_token_id", None)
    (folder / "config.json").write_text(json.dumps(config))
    return KimiTokenizer.from_checkpoint(folder, CheckpointConfig.from_checkpoint(folder))


@pytest.fixture(scope="session")
def k25_tokenizer(tiny_k25: Path, tmp_path_factory: pytest.TempPathFactory) -> KimiTokenizer:
    return _tokenizer("kimi_k25", tiny_k25, tmp_path_factory.mktemp("k25_words"))


@pytest.fixture(scope="session")
def vl_tokenizer(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> KimiTokenizer:
    return _tokenizer("kimi_vl", tiny_vl, tmp_path_factory.mktemp("vl_words"))


@pytest.fixture(scope="session")
def rendered() -> Callable[[str, KimiTokenizer], list[int]]:
    """ids of a prompt written as one string, read the reference's way: names of control tokens become their ids."""

    def rendered(prompt: str, tokenizer: KimiTokenizer) -> list[int]:
        ids: list[int] = []
        for piece in CONTROL.split(prompt):
            ids += [tokenizer.special(piece)] if CONTROL.fullmatch(piece) else tokenizer.encode(piece)
        return ids

    return rendered
