# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's tokenizer, read from tiktoken.model and tokenizer_config.json without any remote code.

Base tokens come first, 256 control-token slots follow them. Names of slots are in `added_tokens_decoder`; a slot
without a name is called `<|reserved_token_{id}|>`. Text never becomes a control token here: whoever builds a prompt
puts control ids in by name.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import tiktoken

from kimi_triton.config import CheckpointConfig, read_json
from kimi_triton.errors import ConfigError
from kimi_triton.text.pretokenize import PATTERN, cut
from kimi_triton.text.special_tokens import MEDIA_PAD, required_tokens

NUM_SPECIAL_SLOTS = 256
ROUND_TRIP_SAMPLE = "Kimi's 2 images:\r\n\n  图片 été かな 🖼️ <|im_end|>\t\x00 100000"


class KimiTokenizer:
    """Byte-pair tokens of text, and control tokens by name. Safe to share between threads."""

    def __init__(self, ranks: dict[bytes, int], special_names: dict[int, str]) -> None:
        self._special_ids = {name: token_id for token_id, name in special_names.items()}
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self._special_ids
        )
        self.control_ids = range(len(ranks), len(ranks) + NUM_SPECIAL_SLOTS)

    @classmethod
    def from_checkpoint(cls, folder: Path, config: CheckpointConfig) -> KimiTokenizer:
        """Read and check the tokenizer of `folder`. Raises ConfigError when it does not fit the checkpoint."""
        ranks = _read_ranks(folder / "tiktoken.model")
        tokenizer = cls(ranks, _read_special_names(folder, len(ranks)))
        _check(tokenizer, config)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Base tokens and control-token slots."""
        return self.control_ids.stop

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, never a control id. A lone surrogate counts as U+FFFD."""
        return [token_id for piece in cut(text) for token_id in self._encoding.encode_ordinary(piece)]

    def special(self, name: str) -> int:
        """Id of a control token. Raises ConfigError when the checkpoint has none of this name."""
        try:
            return self._special_ids[name]
        except KeyError:
            raise ConfigError(f"the checkpoint's tokenizer has no control token {name}") from None

    def is_special(self, token_id: int) -> bool:
        return token_id in self.control_ids

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """UTF-8 bytes of the tokens, possibly ending inside a character.

        A control token gives its name, as `</think>` in an answer should; callers leave out the ones they do not want.
        """
        return self._encoding.decode_bytes(token_ids)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """`base64(token bytes) rank` per line, ranks 0, 1, 2, ... in this order."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise ConfigError(f"{path.name} cannot be read in checkpoint folder {path.parent}: {exc.strerror}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ConfigError(f"{path}: line {number + 1} is no base64 token followed by its rank") from None
        if int(rank) != number or len(ranks) <= number:
            raise ConfigError(f"{path}: line {number + 1} repeats a token or has rank {int(rank)}, expected {number}")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ConfigError(f"{path}: {len(missing)} single bytes have no token, the first one is 0x{missing[0]:02x}")
    return ranks


def _read_special_names(folder: Path, first: int) -> dict[int, str]:
    """Name of each slot from id `first` on; ids behind the last slot have no embedding and are left out."""
    where = folder / "tokenizer_config.json"
    names = {token_id: f"<|reserved_token_{token_id}|>" for token_id in range(first, first + NUM_SPECIAL_SLOTS)}
    for token_id, name in _added_tokens(where).items():
        if token_id < first:
            raise ConfigError(f"{where}: {name} has id {token_id}, but control tokens start at {first}")
        if token_id in names:
            names[token_id] = name
    repeated = [name for name, count in Counter(names.values()).items() if count > 1]
    if repeated:
        ids = [token_id for token_id, name in names.items() if name == repeated[0]]
        raise ConfigError(f"{where}: {repeated[0]} names ids {ids[0]} and {ids[1]}")
    return names


def _added_tokens(where: Path) -> dict[int, str]:
    try:
        decoder = read_json(where)["added_tokens_decoder"]
        return {int(token_id): str(entry["content"]) for token_id, entry in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(f"{where}: added_tokens_decoder does not map token ids to objects with a content") from None


def _check(tokenizer: KimiTokenizer, config: CheckpointConfig) -> None:
    """Refuse a tokenizer that would feed the model other ids than it was trained on."""
    embeddings = config.text.get("vocab_size")
    if embeddings != tokenizer.vocab_size:
        raise ConfigError(
            f"tokenizer and config.json disagree: {tokenizer.vocab_size} token ids, text_config.vocab_size {embeddings}"
        )
    media_pad = tokenizer.special(MEDIA_PAD)
    if media_pad != config.media_placeholder_token_id:
        raise ConfigError(
            f"{MEDIA_PAD} is {media_pad} in tokenizer_config.json, but media_placeholder_token_id is "
            f"{config.media_placeholder_token_id} in config.json"
        )
    for name in required_tokens(config.family):
        tokenizer.special(name)
    text_ids = tokenizer.encode(ROUND_TRIP_SAMPLE)
    if tokenizer.decode_bytes(text_ids) != ROUND_TRIP_SAMPLE.encode() or max(text_ids) in tokenizer.control_ids:
        raise ConfigError(f"tiktoken.model turns {ROUND_TRIP_SAMPLE!r} into {text_ids}, which is other text")
