# SPDX-License-Identifier: Apache-2.0
"""The tokenizer against its rules: an own byte-pair merger over Python's regex, and the self-check at load."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.config import CheckpointConfig
from kimi_triton.errors import ConfigError
from kimi_triton.text.special_tokens import required_tokens
from kimi_triton.text.tokenizer import KimiTokenizer

# The pattern of the spec without class intersection, which Python's regex module does not have.
UPPER = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
LOWER = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
ORACLE_PATTERN = regex.compile(
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MIXED = "今日はKimi's 图片 has 12345 px,\r\n\n  it'S été — 价格￥99。\t中文abc中文\u3000end…  \n" * 20


def load(folder: Path) -> KimiTokenizer:
    return KimiTokenizer.from_checkpoint(folder, CheckpointConfig.from_checkpoint(folder))


@pytest.fixture(scope="module")
def tokenizer(tiny_k25: Path) -> KimiTokenizer:
    return load(tiny_k25)


@pytest.fixture
def editable(tiny_k25: Path, tmp_path: Path) -> Callable[[str, Callable[[dict], object]], Path]:
    """A copy of the tokenizer files in which one JSON file is changed."""

    def edit(name: str, change: Callable[[dict], object]) -> Path:
        for file in ("config.json", "tokenizer_config.json", "tiktoken.model"):
            shutil.copy(tiny_k25 / file, tmp_path / file)
        value = json.loads((tmp_path / name).read_text())
        change(value)
        (tmp_path / name).write_text(json.dumps(value))
        return tmp_path

    return edit


def merge_by_rank(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair encoding as its definition says: again and again the pair of lowest rank, the leftmost first."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def read_ranks(folder: Path) -> dict[bytes, int]:
    rows = (line.split() for line in (folder / "tiktoken.model").read_text().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def test_c3_mixed_chinese_latin_and_digits_equal_a_second_implementation(
    tokenizer: KimiTokenizer, tiny_k25: Path
) -> None:
    assert len(MIXED) > 1000
    ranks = read_ranks(tiny_k25)
    expected = [i for piece in ORACLE_PATTERN.findall(MIXED) for i in merge_by_rank(piece.encode(), ranks)]
    assert tokenizer.encode(MIXED) == expected


@given(st.text(st.sampled_from("aZ é中の9'sS\n\r\t\u3000!<|_\u0301")))
def test_any_text_equals_a_second_implementation(tokenizer: KimiTokenizer, tiny_k25: Path, text: str) -> None:
    ranks = read_ranks(tiny_k25)
    expected = [i for piece in ORACLE_PATTERN.findall(text) for i in merge_by_rank(piece.encode(), ranks)]
    assert tokenizer.encode(text) == expected


def test_han_runs_are_cut_from_the_latin_next_to_them() -> None:
    """Both characters end in a byte that has a token together with "a"; only kana and Latin share a piece."""
    bridges = ["中".encode()[-1:] + b"a", "あ".encode()[-1:] + b"a"]
    tokens = [bytes([value]) for value in range(256)] + bridges
    tokenizer = KimiTokenizer({token: rank for rank, token in enumerate(tokens)}, {})
    assert tokenizer.encode("中a") == [*"中a".encode()]
    assert tokenizer.encode("あa") == [*"あ".encode()[:-1], 257]


@given(st.text())
def test_text_comes_back_byte_for_byte_without_control_ids(tokenizer: KimiTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert not any(map(tokenizer.is_special, ids))


def test_c3_all_256_control_names_are_text_for_encode_and_one_id_by_name(tokenizer: KimiTokenizer) -> None:
    assert len(tokenizer.control_ids) == 256
    for token_id in tokenizer.control_ids:
        name = tokenizer.decode_bytes([token_id]).decode()
        assert tokenizer.special(name) == token_id
        assert tokenizer.decode_bytes(tokenizer.encode(name)) == name.encode()
        assert not any(map(tokenizer.is_special, tokenizer.encode(name)))


def test_c3_unnamed_slots_carry_their_absolute_id(tokenizer: KimiTokenizer) -> None:
    slot = tokenizer.control_ids.start + 100
    assert tokenizer.special(f"<|reserved_token_{slot}|>") == slot


@pytest.mark.parametrize("family", ["kimi_vl", "kimi_k25"])
def test_control_tokens_have_the_released_offsets(family: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load(request.getfixturevalue("tiny_vl" if family == "kimi_vl" else "tiny_k25"))
    released = {"[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_middle|>": 17, "<|media_pad|>": 21}
    released["<|media_start|>" if family == "kimi_vl" else "<|media_begin|>"] = 18
    for name, offset in released.items():
        assert tokenizer.special(name) == tokenizer.control_ids.start + offset


def test_unknown_control_token_is_named(tokenizer: KimiTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"no control token <\|media_start\|>"):
        tokenizer.special("<|media_start|>")


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer: KimiTokenizer) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode("a\ud800b")) == "a\ufffdb".encode()


def test_c3_shifted_media_pad_is_refused_with_both_numbers(editable, tokenizer: KimiTokenizer) -> None:
    pad = tokenizer.special("<|media_pad|>")
    folder = editable("config.json", lambda c: c.update(media_placeholder_token_id=pad - 3, image_token_id=pad - 3))
    with pytest.raises(ConfigError, match=rf"{pad} .* {pad - 3}"):
        load(folder)


@pytest.mark.parametrize("name", required_tokens("kimi_k25"))
def test_c3_missing_control_token_is_refused_by_name(editable, tokenizer: KimiTokenizer, name: str) -> None:
    key = str(tokenizer.special(name))
    folder = editable("tokenizer_config.json", lambda c: c["added_tokens_decoder"].pop(key))
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert name in str(caught.value)


def test_c3_one_name_for_two_ids_is_refused(editable, tokenizer: KimiTokenizer) -> None:
    first = tokenizer.control_ids.start
    folder = editable(
        "tokenizer_config.json", lambda c: c["added_tokens_decoder"].update({str(first + 30): {"content": "[EOS]"}})
    )
    with pytest.raises(ConfigError, match=rf"\[EOS\] names ids {first + 1} and {first + 30}"):
        load(folder)


def test_c3_control_name_inside_the_base_vocabulary_is_refused(editable, tokenizer: KimiTokenizer) -> None:
    folder = editable(
        "tokenizer_config.json", lambda c: c["added_tokens_decoder"].update({"7": {"content": "<|low|>"}})
    )
    with pytest.raises(ConfigError, match=rf"<\|low\|> has id 7, .* {tokenizer.control_ids.start}"):
        load(folder)


def test_c3_vocabulary_of_another_size_is_refused_with_both_numbers(editable, tokenizer: KimiTokenizer) -> None:
    size = tokenizer.vocab_size
    folder = editable("config.json", lambda c: c["text_config"].update(vocab_size=size + 2))
    with pytest.raises(ConfigError, match=rf"{size} .* {size + 2}"):
        load(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:9], "no-base64! 9", *lines[10:]], "line 10 "),
        (lambda lines: [*lines[:9], lines[10], *lines[9:]], "line 10 .* expected 9"),
        (lambda lines: [*lines, lines[-1].split()[0] + f" {len(lines)}"], "repeats a token"),
        (lambda lines: [f"{base64.b64encode(b'ab').decode()} 0", *lines[1:]], "0x00"),
        (lambda lines: lines[:0], "256 single bytes"),
    ],
)
def test_damaged_tiktoken_model_is_refused(editable, damage, message: str) -> None:
    folder = editable("config.json", lambda c: c)
    path = folder / "tiktoken.model"
    path.write_text("\n".join(damage(path.read_text().splitlines())))
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_missing_files_are_named(editable) -> None:
    folder = editable("config.json", lambda c: c)
    (folder / "tiktoken.model").unlink()
    with pytest.raises(ConfigError, match=r"tiktoken\.model"):
        load(folder)


@pytest.mark.parametrize("decoder", [None, [], {"x": {"content": "a"}}, {"400": "a"}, {"400": {}}])
def test_unreadable_added_tokens_are_refused(editable, decoder: object) -> None:
    folder = editable("tokenizer_config.json", lambda c: c.update(added_tokens_decoder=decoder))
    with pytest.raises(ConfigError, match="added_tokens_decoder"):
        load(folder)
