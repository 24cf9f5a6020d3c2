# SPDX-License-Identifier: Apache-2.0
"""transformers' DeepseekV3Config from the text_config of a Kimi checkpoint."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import DeepseekV3Config

from kimi_triton.errors import ConfigError

# transformers has one body for each of these; another value would be computed as if it were this one.
IMPLEMENTED: dict[str, Any] = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "rope_interleave": True,
}
# Left out, transformers would fill these in with DeepSeek's numbers.
REQUIRED = (
    "first_k_dense_replace",
    "max_position_embeddings",
    "n_group",
    "n_shared_experts",
    "num_experts_per_tok",
    "rope_theta",
    "routed_scaling_factor",
    "topk_group",
)
# Settings of the repository around the model, not of its computation.
IGNORED = frozenset(
    ("architectures", "auto_map", "dtype", "model_type", "quantization_config", "torch_dtype", "transformers_version")
)


def deepseek_config(text: dict[str, Any]) -> DeepseekV3Config:
    """Raise ConfigError, naming the field, for what is missing or not implemented."""
    for name, value in IMPLEMENTED.items():
        if text.get(name, value) != value:
            raise ConfigError(f"config.json: text_config.{name} is {text[name]!r}, only {value!r} is implemented")
    for name in REQUIRED:
        if text.get(name) is None:
            raise ConfigError(f"config.json: text_config.{name} is missing")
    _check_rope(text.get("rope_scaling"))
    settings = {name: value for name, value in text.items() if name not in IGNORED}
    try:
        return DeepseekV3Config(**settings)
    except (StrictDataclassError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"config.json: text_config is refused by transformers: {exc}") from exc


def _check_rope(scaling: dict[str, Any] | None) -> None:
    """Other kinds change their frequencies with the longest request of a batch, so neighbours would be felt."""
    if scaling is None:
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"config.json: text_config.rope_scaling is of type {kind!r}, only 'yarn' is implemented")
