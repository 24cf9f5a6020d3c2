# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of all tensors that a config.json implies, in the released layouts."""

from __future__ import annotations

from typing import Any

from kimi_triton.config import PATCH_SIZE, CheckpointConfig, VisionConfig
from kimi_triton.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]

# Tables that some fine-tunes store although they follow from the config.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
PACK_FACTOR = 8  # int4 values in one int32


def is_derived(name: str) -> bool:
    return name.endswith(DERIVED_SUFFIXES)


def expected_tensors(config: CheckpointConfig) -> Shapes:
    return vision_tensors(config.vision) | language_tensors(config.text, quantization_group(config.quantization))


def vision_tensors(config: VisionConfig) -> Shapes:
    """MoonViT and its projector."""
    hidden, mlp, merged = config.hidden_size, config.intermediate_size, config.hidden_size * 4
    tower = "vision_tower"
    shapes: Shapes = {
        f"{tower}.patch_embed.proj.weight": (hidden, 3, PATCH_SIZE, PATCH_SIZE),
        f"{tower}.patch_embed.proj.bias": (hidden,),
        f"{tower}.patch_embed.pos_emb.weight": (config.pos_emb_height, config.pos_emb_width, hidden),
    }
    for layer in range(config.num_hidden_layers):
        block = f"{tower}.encoder.blocks.{layer}"
        shapes |= _norm(f"{block}.norm0", hidden) | _norm(f"{block}.norm1", hidden)
        shapes |= _linear(f"{block}.wqkv", 3 * hidden, hidden) | _linear(f"{block}.wo", hidden, hidden)
        shapes |= _linear(f"{block}.mlp.fc0", mlp, hidden) | _linear(f"{block}.mlp.fc1", hidden, mlp)
    shapes |= _norm(f"{tower}.encoder.final_layernorm", hidden)
    first, second = ("linear_1", "linear_2") if config.family == "kimi_vl" else ("proj.0", "proj.2")
    shapes |= _norm(f"{config.projector_prefix}.pre_norm", hidden)
    shapes |= _linear(f"{config.projector_prefix}.{first}", merged, merged)
    return shapes | _linear(f"{config.projector_prefix}.{second}", config.text_hidden_size, merged)


def language_tensors(text: dict[str, Any], group_size: int | None = None) -> Shapes:
    """DeepSeek-V3 under `language_model.`; with `group_size` the routed experts are packed int4."""
    try:
        shapes: Shapes = {
            "language_model.model.embed_tokens.weight": (text["vocab_size"], text["hidden_size"]),
            "language_model.model.norm.weight": (text["hidden_size"],),
        }
        if not text.get("tie_word_embeddings", False):
            shapes["language_model.lm_head.weight"] = (text["vocab_size"], text["hidden_size"])
        for layer in range(text["num_hidden_layers"]):
            prefix = f"language_model.model.layers.{layer}"
            shapes |= _attention(f"{prefix}.self_attn", text)
            shapes[f"{prefix}.input_layernorm.weight"] = (text["hidden_size"],)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (text["hidden_size"],)
            if _is_moe(layer, text):
                shapes |= _moe(f"{prefix}.mlp", text, group_size)
            else:
                shapes |= _mlp(f"{prefix}.mlp", text["hidden_size"], text["intermediate_size"])
        return shapes
    except KeyError as exc:
        raise ConfigError(f"config.json: text_config.{exc.args[0]} is missing") from exc


def quantization_group(quantization: dict[str, Any] | None) -> int | None:
    """Group size of packed int4 experts, None for plain weights. Any other scheme is refused by name."""
    if quantization is None:
        return None
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if method != "compressed-tensors" or layout != "pack-quantized":
        raise ConfigError(
            f"config.json: quantization {method!r} in format {layout!r} is not implemented, "
            "only 'compressed-tensors' in 'pack-quantized'"
        )
    groups = list(quantization.get("config_groups", {}).values())
    if len(groups) != 1:
        raise ConfigError(f"config.json: quantization_config has {len(groups)} config_groups, expected 1")
    weights = groups[0].get("weights") or {}
    for key, wanted in (("num_bits", 4), ("type", "int"), ("symmetric", True), ("strategy", "group")):
        if weights.get(key) != wanted:
            raise ConfigError(f"config.json: quantization weights.{key} is {weights.get(key)!r}, expected {wanted!r}")
    return int(weights["group_size"])


def _is_moe(layer: int, text: dict[str, Any]) -> bool:
    return bool(layer >= text["first_k_dense_replace"] and layer % text.get("moe_layer_freq", 1) == 0)


def _attention(prefix: str, text: dict[str, Any]) -> Shapes:
    hidden, heads, latent = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    shapes: Shapes = {
        f"{prefix}.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        f"{prefix}.kv_a_layernorm.weight": (latent,),
        f"{prefix}.kv_b_proj.weight": (heads * (nope + value), latent),
        f"{prefix}.o_proj.weight": (hidden, heads * value),
    }
    if (query_latent := text.get("q_lora_rank")) is None:
        shapes[f"{prefix}.q_proj.weight"] = (heads * (nope + rope), hidden)
    else:
        shapes[f"{prefix}.q_a_proj.weight"] = (query_latent, hidden)
        shapes[f"{prefix}.q_a_layernorm.weight"] = (query_latent,)
        shapes[f"{prefix}.q_b_proj.weight"] = (heads * (nope + rope), query_latent)
    return shapes


def _moe(prefix: str, text: dict[str, Any], group_size: int | None) -> Shapes:
    hidden, width, experts = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    shapes: Shapes = {f"{prefix}.gate.weight": (experts, hidden), f"{prefix}.gate.e_score_correction_bias": (experts,)}
    for expert in range(experts):
        plain = _mlp(f"{prefix}.experts.{expert}", hidden, width)
        shapes |= plain if group_size is None else _packed(plain, group_size)
    if text.get("n_shared_experts"):
        shapes |= _mlp(f"{prefix}.shared_experts", hidden, width * text["n_shared_experts"])
    return shapes


def _packed(plain: Shapes, group_size: int) -> Shapes:
    shapes: Shapes = {}
    for name, (rows, columns) in plain.items():
        shapes[f"{name}_packed"] = (rows, columns // PACK_FACTOR)
        shapes[f"{name}_scale"] = (rows, columns // group_size)
        shapes[f"{name}_shape"] = (2,)
    return shapes


def _mlp(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _linear(prefix: str, rows: int, columns: int) -> Shapes:
    return {f"{prefix}.weight": (rows, columns), f"{prefix}.bias": (rows,)}


def _norm(prefix: str, width: int) -> Shapes:
    return {f"{prefix}.weight": (width,), f"{prefix}.bias": (width,)}
