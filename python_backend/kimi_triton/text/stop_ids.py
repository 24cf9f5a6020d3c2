# SPDX-License-Identifier: Apache-2.0
"""Which tokens end an answer."""

from __future__ import annotations

from pathlib import Path

from kimi_triton.config import CheckpointConfig, read_json
from kimi_triton.errors import ConfigError
from kimi_triton.text.special_tokens import EOS, IM_END
from kimi_triton.text.tokenizer import KimiTokenizer


def stop_token_ids(folder: Path, config: CheckpointConfig, tokenizer: KimiTokenizer) -> frozenset[int]:
    """Union of config.json, generation_config.json (which may be missing), [EOS] and <|im_end|>.

    The released configs name [EOS] alone, but chat turns end with <|im_end|>: without it a model writes the next
    user turn. Raises ConfigError for an id that the tokenizer does not have.
    """
    stop_ids = {*config.eos_token_ids, tokenizer.special(EOS), tokenizer.special(IM_END)}
    if (folder / "generation_config.json").is_file():
        stated = read_json(folder / "generation_config.json").get("eos_token_id") or []
        stop_ids.update(stated if isinstance(stated, list) else [stated])
    for token_id in stop_ids:
        if not isinstance(token_id, int) or not 0 <= token_id < tokenizer.vocab_size:
            raise ConfigError(f"eos_token_id {token_id!r} is none of the tokenizer's {tokenizer.vocab_size} ids")
    return frozenset(stop_ids)
