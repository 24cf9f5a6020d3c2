# SPDX-License-Identifier: Apache-2.0
"""The language model of a checkpoint as transformers' DeepseekV3ForCausalLM, every parameter accounted for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.llm.expert_weights import ExpertWeights
from kimi_triton.llm.latent_attention import LatentAttention
from kimi_triton.llm.text_config import deepseek_config

PREFIX = "language_model."
Progress = Callable[[int, int], None]  # tensors read so far, tensors in all


def load_language_model(
    checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> DeepseekV3ForCausalLM:
    """Build on the meta device, then assign what the checkpoint holds. Raises ConfigError, naming the parameter.

    Weights take `dtype`; those of the router stay in fp32, in which it computes.
    """
    model = _empty_model(checkpoint)
    weights = _read_weights(checkpoint, model, device, dtype, progress or _ignore)
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as exc:
        raise ConfigError(f"language model: {exc}") from exc
    model.model.rotary_emb = DeepseekV3RotaryEmbedding(model.config).to(device)
    model.requires_grad_(False)
    model.train(False)
    return model


def default_dtype(device: torch.device) -> torch.dtype:
    """fp32 on a CPU, which is faster there than bf16 without special instructions; bf16 as stored on a GPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _ignore(_done: int, _total: int) -> None:
    """No one wants to see the progress."""


def _empty_model(checkpoint: Checkpoint) -> DeepseekV3ForCausalLM:
    config = deepseek_config(checkpoint.config.text)
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn = LatentAttention(config, index)
    return model


def _read_weights(
    checkpoint: Checkpoint, model: DeepseekV3ForCausalLM, device: torch.device, dtype: torch.dtype, progress: Progress
) -> dict[str, Tensor]:
    names = checkpoint.names(PREFIX)
    experts = ExpertWeights(model.config.n_routed_experts, device, dtype)
    weights: dict[str, Tensor] = {}
    for done, (stored_name, tensor) in enumerate(checkpoint.read(names), start=1):
        name = stored_name.removeprefix(PREFIX)
        if not experts.take(name, tensor):
            weights[name] = tensor.to(device, torch.float32 if ".mlp.gate." in name else dtype)
        progress(done, len(names))
    experts.check_complete()
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights | experts.fused
