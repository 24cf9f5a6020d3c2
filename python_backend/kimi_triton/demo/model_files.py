# SPDX-License-Identifier: Apache-2.0
"""The files around the weights of the demo model: config.json, tokenizer, processor and generation settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kimi_triton.demo.questions import vocabulary
from kimi_triton.demo.tiny import NUM_SPECIALS, k25_vision_config, processor_config, write_tokenizer

VISION_SIZES = {"hidden_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
TABLE_SIDE = 20  # side of the learned position table
TEXT_HIDDEN_SIZE = 192


def write_model_files(folder: Path) -> None:
    """Everything of the checkpoint but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    first_special = write_tokenizer(folder, "kimi_k25", word_tokens())
    _write_json(folder / "config.json", _config(first_special))
    _write_json(folder / "preprocessor_config.json", processor_config("kimi_k25"))
    # top_k 1: answers of so small a model are meant to be its likeliest ones.
    generation = {
        "eos_token_id": [first_special + 1, first_special + 2],
        "pad_token_id": first_special + 255,
        "do_sample": True,
        "top_k": 1,
        "max_new_tokens": 64,
    }
    _write_json(folder / "generation_config.json", generation)


def word_tokens() -> list[bytes]:
    """One token for each word of the questions and answers. Digits stay single bytes: one token each."""
    words = dict.fromkeys(word for text in vocabulary() for word in re.findall(r" ?[A-Za-z]+", text))
    return [word.encode() for word in words if len(word) > 1]


def _config(first_special: int) -> dict[str, Any]:
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": first_special + NUM_SPECIALS,
        "hidden_size": TEXT_HIDDEN_SIZE,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "bos_token_id": first_special,
        "eos_token_id": first_special + 1,
        "pad_token_id": first_special + 255,
        "media_placeholder_token_id": first_special + 21,
        "image_token_id": first_special + 21,
        "projection_hidden_size": VISION_SIZES["hidden_size"],
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": k25_vision_config(VISION_SIZES, TABLE_SIDE, TEXT_HIDDEN_SIZE),
        "text_config": text,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
