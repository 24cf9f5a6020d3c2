# SPDX-License-Identifier: Apache-2.0
"""Write tiny seeded checkpoints in exactly the released layouts: for tests, and to try a server without big weights.

The weights are random, so the answers are noise; everything else (names, config spellings, tokenizer and processor
files, sharding) is as in the released repositories. transformers reads no `vt_*` sizes, so the K2.5 config spells
them both ways.
"""

from __future__ import annotations

import base64
import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kimi_triton.checkpoint import INDEX
from kimi_triton.config import CheckpointConfig, Family
from kimi_triton.inventory import expected_tensors

# Two-letter tokens on top of the 256 single bytes, written without gaps, in rank order.
PAIRS = (
    " ttheheinerar an ionreatenndst esoriseted ofing tois imagecowhchilollsh aro me s wnu bigct"
    "urhopi cal fve ldeidougrt hli pr mea dne b"
)
NUM_SPECIALS = 256
# Offsets from the first special id, as in the released tokenizer_config.json.
SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
K25_SPECIALS = {
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    22: "<think>",
    23: "</think>",
}
VISION_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TABLE_SIDE = 16  # side of the learned position table


def write_tiny_checkpoint(folder: Path, family: Family = "kimi_k25", seed: int = 0, num_shards: int = 2) -> Path:
    """Write a checkpoint of about 2 M bf16 parameters into `folder`; the same arguments give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    first_special = write_tokenizer(folder, family)
    _write_json(folder / "config.json", _config(family, first_special))
    _write_json(folder / "preprocessor_config.json", processor_config(family))
    generation = {"eos_token_id": [first_special + 1, first_special + 2], "pad_token_id": first_special + 255}
    _write_json(folder / "generation_config.json", generation)
    save_sharded(folder, random_weights(CheckpointConfig.from_checkpoint(folder), seed), num_shards)
    return folder


def write_tokenizer(folder: Path, family: Family, pieces: list[bytes] | None = None) -> int:
    """tiktoken.model and tokenizer_config.json; returns the id of the first special token."""
    if pieces is None:
        pairs = [PAIRS[start : start + 2].encode() for start in range(0, len(PAIRS), 2)]
        pieces = list(dict.fromkeys(pairs))
    ranks = [bytes([value]) for value in range(256)] + pieces
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = SPECIALS | ({18: "<|media_start|>"} if family == "kimi_vl" else K25_SPECIALS)
    decoder = {
        str(len(ranks) + offset): {"content": name, "special": True, "lstrip": False, "rstrip": False}
        for offset, name in sorted(names.items())
    }
    tokenizer = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "added_tokens_decoder": decoder,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer)
    return len(ranks)


def random_weights(config: CheckpointConfig, seed: int) -> dict[str, Tensor]:
    """Seeded bf16 weights, scaled by 1/sqrt(fan-in) so that activations keep their size; router biases stay fp32."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            weights[name] = 0.01 * noise
            continue
        if name.endswith("pos_emb.weight"):
            value = 0.3 * noise
        elif "norm" in name and name.endswith("weight"):
            value = 1 + 0.1 * noise
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            value = noise
        else:
            value = noise * prod(shape[1:]) ** -0.5
        weights[name] = value.to(torch.bfloat16)
    return weights


def save_sharded(folder: Path, weights: dict[str, Tensor], num_shards: int) -> None:
    """Write `weights` as equal runs of tensors with an index, the way the released repositories are cut."""
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:06d}.safetensors"
        part = names[len(names) * shard // num_shards : len(names) * (shard + 1) // num_shards]
        save_file({name: weights[name] for name in part}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def processor_config(family: Family) -> dict[str, Any]:
    """preprocessor_config.json with the released values."""
    if family == "kimi_vl":
        return {
            "image_processor_type": "KimiVLImageProcessor",
            "patch_size": 14,
            "pad_input": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "in_token_limit": 4096,
            "merge_kernel_size": [2, 2],
            "num_pooled_tokens": 1024,
        }
    return {
        "image_processor_type": "KimiK25VisionProcessor",
        "media_proc_cfg": {
            "in_patch_limit": 16384,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 512,
            "in_patch_limit_each_frame": 4096,
            "in_patch_limit_video": None,
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
        },
    }


def _config(family: Family, first_special: int) -> dict[str, Any]:
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": first_special + NUM_SPECIALS,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446 if family == "kimi_vl" else 2.827,
        "q_lora_rank": None if family == "kimi_vl" else 48,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 800000.0 if family == "kimi_vl" else 50000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    shared = {
        "model_type": family,
        "media_placeholder_token_id": first_special + 21,
        "pad_token_id": first_special + 255,
        "vocab_size": text["vocab_size"],
        "tie_word_embeddings": False,
    }
    if family == "kimi_vl":
        vision = {
            "model_type": "moonvit",
            "patch_size": 14,
            "init_pos_emb_height": TABLE_SIDE,
            "init_pos_emb_width": TABLE_SIDE,
            "merge_kernel_size": [2, 2],
        }
        architecture = {"architectures": ["KimiVLForConditionalGeneration"], "torch_dtype": "bfloat16"}
        return architecture | shared | {"vision_config": vision | VISION_SIZES, "text_config": text}
    text["rope_scaling"] = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return (
        {"architectures": ["KimiK25ForConditionalGeneration"], "dtype": "bfloat16"}
        | shared
        | {
            "bos_token_id": first_special,
            "eos_token_id": first_special + 1,
            "image_token_id": first_special + 21,
            "projection_hidden_size": VISION_SIZES["hidden_size"],
            "use_unified_vision_chunk": True,
            "video_placeholder": "<|kimi_k25_video_placeholder|>",
            "vision_config": k25_vision_config(VISION_SIZES, TABLE_SIDE, 128),
            "text_config": text,
        }
    )


def k25_vision_config(sizes: dict[str, int], table_side: int, text_hidden_size: int) -> dict[str, Any]:
    """The released spelling and transformers' own one, side by side."""
    return (
        {f"vt_{name}": value for name, value in sizes.items()}
        | sizes
        | {
            "patch_size": 14,
            "init_pos_emb_height": table_side,
            "init_pos_emb_width": table_side,
            "init_pos_emb_time": 4,
            "pos_emb_height": table_side,
            "pos_emb_width": table_side,
            "pos_emb_time": 4,
            "pos_emb_type": "divided_fixed",
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "video_attn_type": "spatial_temporal",
            "mm_hidden_size": sizes["hidden_size"],
            "text_hidden_size": text_hidden_size,
            "mm_projector_type": "patchmerger",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
        }
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
