# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.questions import ORDINALS, READ_NUMBER, vocabulary
from kimi_triton.demo.scenes import COLOURS, SHAPES
from kimi_triton.text.tokenizer import KimiTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_model_files(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> KimiTokenizer:
    return KimiTokenizer.from_checkpoint(folder, CheckpointConfig.from_checkpoint(folder))


def test_each_digit_is_one_token(tokenizer: KimiTokenizer) -> None:
    assert tokenizer.encode("0123456789") == [ord(digit) for digit in "0123456789"]


@pytest.mark.parametrize("word", [*SHAPES, *COLOURS, " " + ORDINALS[0], " the", "user", "assistant", "image"])
def test_each_word_is_one_token(tokenizer: KimiTokenizer, word: str) -> None:
    assert len(tokenizer.encode(word)) == 1


def test_questions_are_short(tokenizer: KimiTokenizer) -> None:
    assert [len(tokenizer.encode(question)) for question in READ_NUMBER] == [5, 4, 6]
    assert all(tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode() for text in vocabulary())


def test_sizes_suit_the_attention_kernel_of_vllm_on_a_cpu(folder: Path) -> None:
    config = CheckpointConfig.from_checkpoint(folder)
    assert config.family == "kimi_k25"
    assert (config.text["kv_lora_rank"], config.text["qk_rope_head_dim"]) == (512, 64)
