# SPDX-License-Identifier: Apache-2.0
"""The maths of Kimi-K2.5 for training: plain functions over a dict of weights that bear their released names.

Made for small models on a CPU. Everything is packed: linear layers run once over the patches or tokens of a whole
batch, attention runs over groups of sequences of similar length, and each expert is computed for every token, with
weight zero where the router did not choose it. Tests compare it with transformers' own classes.

Numbers of rows are rounded up, because oneDNN compiles each matrix product anew for each size it meets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_triton.config import CheckpointConfig
from kimi_triton.inventory import expected_tensors
from kimi_triton.preprocess.patches import Grid

Weights = dict[str, Tensor]
ROUTER_BIAS = "e_score_correction_bias"  # fp32 also in a bf16 checkpoint; stays zero here
SCALES = {"pos_emb": 0.2, "embed_tokens": 0.02}
MAX_WASTE = 0.7  # shortest over longest sequence of a group
ROWS_STEP, LENGTH_STEP = 512, 32  # what rows of a pack and lengths of sequences are rounded up to
GROUP_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32)  # numbers of sequences


def initial_weights(config: CheckpointConfig, seed: int) -> Weights:
    """Normal at 1/sqrt(fan-in), the position table at 0.2, word rows at 0.02; norms are the identity, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        if name.endswith("bias"):
            value = torch.zeros(shape)
        elif "norm" in name:
            value = torch.ones(shape)
        else:
            fan_in = torch.Size(shape[1:]).numel()
            scale = SCALES.get(name.rsplit(".", 2)[-2], fan_in**-0.5)
            value = scale * torch.randn(shape, generator=generator)
        weights[name] = value.requires_grad_(not name.endswith(ROUTER_BIAS))
    return weights


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of similar length: `rows` gathers them from (rows * heads, size), filled up to `length` with row 0."""

    rows: Tensor  # (sequences * heads * length,), of sequences that may be there only to fill the group up
    length: int
    hidden: Tensor  # added to the scores: (sequences * heads, 1, length) or (length, length)


@dataclass(frozen=True, slots=True)
class Groups:
    """How the sequences of a pack are gathered for attention, and where each row lies in the results behind it."""

    groups: tuple[Group, ...]
    order: Tensor  # (rows * heads,); rows beyond the sequences get any result

    @classmethod
    def of(cls, lengths: list[int], num_rows: int, heads: int, causal: bool) -> Groups:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        parts: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if not parts or lengths[i] < MAX_WASTE * lengths[parts[-1][0]]:
                parts.append([])
            parts[-1].append(i)
        groups, order, base, head = [], torch.zeros(num_rows * heads, dtype=torch.long), 0, torch.arange(heads)
        for part in parts:
            length = rounded_up(lengths[part[0]], LENGTH_STEP)
            part += part[:1] * (next((size for size in GROUP_SIZES if size >= len(part)), len(part)) - len(part))
            own = torch.tensor([[lengths[i]] for i in part])
            steps = torch.arange(length)
            valid = steps < own  # (sequences, length)
            tokens = torch.where(valid, torch.tensor([[starts[i]] for i in part]) + steps, 0)
            rows = tokens[:, None] * heads + head[:, None]  # (sequences, heads, length)
            results = base + torch.arange(rows.numel()).view(rows.shape)
            seen = valid[:, None].expand(rows.shape)
            order[rows[seen]] = results[seen]
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else ~seen.flatten(0, 1)[:, None]
            groups.append(Group(rows.flatten(), length, hidden * -1e4))
            base += rows.numel()
        return cls(tuple(groups), order)


def rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def filled_up(x: Tensor, step: int) -> Tensor:
    """`x` with rows of zeros behind it, up to a multiple of `step`."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % step))


def attend(q: Tensor, k: Tensor, v: Tensor, groups: Groups) -> Tensor:
    """(rows, heads, size) each -> (rows, heads * value size): rows see their own sequence.

    torch's fused attention is several times slower here: its backward pass is not made for short sequences.
    """
    results = []
    flat = [x.reshape(-1, x.shape[-1]) for x in (q, k, v)]
    for group in groups.groups:
        queries, keys, values = (x.index_select(0, group.rows).view(-1, group.length, x.shape[-1]) for x in flat)
        hidden = group.hidden.to(q.dtype)
        scores = torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        results.append((scores.softmax(-1) @ values).flatten(0, 1))
    return torch.cat(results).index_select(0, groups.order).view(len(q), -1)


def turn_pairs(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding over adjacent elements of the last axis; `turns` are cosines and sines, each one twice."""
    cos, sin = turns
    # One product over all rows: torch would make a batched one of it, with a copy of the matrix for each row.
    turned = (x.reshape(-1, x.shape[-1]) @ _quarter_turn(x.shape[-1], x.dtype)).view(x.shape)
    return x * cos + turned * sin


@cache
def _quarter_turn(size: int, dtype: torch.dtype) -> Tensor:
    """(size, size): each pair (a, b) becomes (-b, a). A product is faster than moving single elements."""
    return torch.kron(torch.eye(size // 2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])).to(dtype)


def _turns(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(rows, size / 2) angles -> cosines and sines (rows, 1, size)."""
    angles = angles.repeat_interleave(2, -1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


# --- vision tower ------------------------------------------------------------------------------------------------


def tower_states(weights: Weights, config: CheckpointConfig, pixel_values: Tensor, grids: list[Grid]) -> Tensor:
    """uint8 (patches, 3, 14, 14) -> the vision tower's last hidden states (patches, hidden_size), normalised, and more
    rows behind them, up to a round number."""
    vision = config.vision
    proj = weights["vision_tower.patch_embed.proj.weight"].flatten(1)
    pixels = filled_up((pixel_values.flatten(1).float() / 127.5 - 1).to(proj.dtype), ROWS_STEP)
    x = F.linear(pixels, proj, weights["vision_tower.patch_embed.proj.bias"])
    table = weights["vision_tower.patch_embed.pos_emb.weight"].flatten(0, 1)
    positions = [_interpolation(h, w, vision.pos_emb_height, proj.dtype) for _, h, w in grids]
    x = x + filled_up(torch.cat(positions), ROWS_STEP) @ table
    angles = torch.cat([_vision_angles(h, w, vision.head_dim) for _, h, w in grids])
    turns = _turns(filled_up(angles, ROWS_STEP), proj.dtype)
    groups = Groups.of([h * w for _, h, w in grids], len(x), vision.num_attention_heads, causal=False)
    for layer in range(vision.num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{layer}"
        qkv = _linear(weights, f"{block}.wqkv", _layer_norm(weights, f"{block}.norm0", x))
        q, k, v = qkv.view(len(x), 3, vision.num_attention_heads, vision.head_dim).unbind(1)
        attended = attend(turn_pairs(q, turns), turn_pairs(k, turns), v, groups)
        x = x + _linear(weights, f"{block}.wo", attended)
        hidden = _linear(weights, f"{block}.mlp.fc0", _layer_norm(weights, f"{block}.norm1", x))
        x = x + _linear(weights, f"{block}.mlp.fc1", F.gelu(hidden, approximate="tanh"))
    return _layer_norm(weights, "vision_tower.encoder.final_layernorm", x)


def image_embeds(weights: Weights, x: Tensor, grids: list[Grid]) -> Tensor:
    """The tower's states -> rows for the language model (tokens, text_hidden_size), and more behind them."""
    sizes = [h * w for _, h, w in grids]
    *images, rest = torch.split(x, [*sizes, len(x) - sum(sizes)])
    cells = torch.cat(
        [*(_cells(image, h, w) for image, (_, h, w) in zip(images, grids, strict=True)), rest.view(-1, 4, x.shape[-1])]
    )
    merged = _layer_norm(weights, "mm_projector.pre_norm", cells).flatten(1)
    return _linear(weights, "mm_projector.proj.2", F.gelu(_linear(weights, "mm_projector.proj.0", merged)))


def _cells(x: Tensor, h: int, w: int) -> Tensor:
    """(h * w, width) -> (h/2 * w/2, 4, width)."""
    return x.view(h // 2, 2, w // 2, 2, -1).transpose(1, 2).reshape(h * w // 4, 4, -1)


@cache
def _interpolation(h: int, w: int, side: int, dtype: torch.dtype) -> Tensor:
    """(h * w, side * side): the bicubic interpolation of the position table as a matrix."""
    identity = torch.eye(side * side).view(side * side, 1, side, side)
    resized = F.interpolate(identity, (h, w), mode="bicubic", align_corners=False)
    return resized.view(side * side, h * w).T.contiguous().to(dtype)


@cache
def _vision_angles(h: int, w: int, head_dim: int) -> Tensor:
    """(h * w, head_dim / 2): pair 2i turns with the column, pair 2i + 1 with the row."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 4) / head_dim)
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack([columns[..., None] * frequencies, rows[..., None] * frequencies], -1).view(h * w, -1)


# --- language model ----------------------------------------------------------------------------------------------


def hidden_states(weights: Weights, config: CheckpointConfig, inputs_embeds: Tensor, lengths: list[int]) -> Tensor:
    """(tokens, hidden_size) of all prompts, one behind the other -> the last hidden states, normalised, and more rows
    behind them, up to a round number."""
    text = config.text
    eps = text["rms_norm_eps"]
    frequencies = text["rope_theta"] ** (-torch.arange(0, text["qk_rope_head_dim"], 2) / text["qk_rope_head_dim"])
    x = filled_up(inputs_embeds, ROWS_STEP)
    positions = torch.cat([torch.arange(length) for length in (*lengths, len(x) - len(inputs_embeds))])
    turns = _turns(positions[:, None] * frequencies, x.dtype)
    groups = Groups.of(lengths, len(x), text["num_attention_heads"], causal=True)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"language_model.model.layers.{layer}"
        normed = _rms_norm(weights, f"{prefix}.input_layernorm", x, eps)
        x = x + _latent_attention(weights, f"{prefix}.self_attn", text, normed, turns, groups)
        normed = _rms_norm(weights, f"{prefix}.post_attention_layernorm", x, eps)
        feed_forward = _mlp if layer < text["first_k_dense_replace"] else _experts
        x = x + feed_forward(weights, f"{prefix}.mlp", text, normed)
    return _rms_norm(weights, "language_model.model.norm", x, eps)


def _latent_attention(
    weights: Weights, prefix: str, text: dict[str, Any], x: Tensor, turns: tuple[Tensor, Tensor], groups: Groups
) -> Tensor:
    heads, nope, rope = text["num_attention_heads"], text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    eps = text["rms_norm_eps"]
    latent_q = _linear(weights, f"{prefix}.q_a_proj", x)
    q = _normed_linear(weights, f"{prefix}.q_a_layernorm", f"{prefix}.q_b_proj", latent_q, eps)
    q = q.view(len(x), heads, nope + rope)
    compressed = _linear(weights, f"{prefix}.kv_a_proj_with_mqa", x)
    latent, k_rope = torch.split(compressed, [text["kv_lora_rank"], rope], -1)
    kv = _normed_linear(weights, f"{prefix}.kv_a_layernorm", f"{prefix}.kv_b_proj", latent, eps)
    kv = kv.view(len(x), heads, nope + text["v_head_dim"])
    k_nope, v = torch.split(kv, [nope, text["v_head_dim"]], -1)
    q = torch.cat([q[..., :nope], turn_pairs(q[..., nope:], turns)], -1)
    k_rope = turn_pairs(k_rope[:, None], turns).expand(-1, heads, -1)
    k = torch.cat([k_nope, k_rope], -1)
    return _linear(weights, f"{prefix}.o_proj", attend(q, k, v, groups))


def _mlp(weights: Weights, prefix: str, text: dict[str, Any], x: Tensor) -> Tensor:  # noqa: ARG001 (as _experts)
    gate, up = _linear(weights, f"{prefix}.gate_proj", x), _linear(weights, f"{prefix}.up_proj", x)
    return _linear(weights, f"{prefix}.down_proj", F.silu(gate) * up)


def _experts(weights: Weights, prefix: str, text: dict[str, Any], x: Tensor) -> Tensor:
    """Sigmoid router; the chosen experts' weights sum to routed_scaling_factor. The shared expert is added as it is."""
    count, chosen = text["n_routed_experts"], text["num_experts_per_tok"]
    scores = F.linear(x.float(), weights[f"{prefix}.gate.weight"].float()).sigmoid()
    picked = (scores + weights[f"{prefix}.gate.e_score_correction_bias"]).topk(chosen, -1).indices
    shares = torch.zeros_like(scores).scatter(-1, picked, scores.gather(-1, picked))
    shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * text["routed_scaling_factor"]
    gate, up = (
        F.linear(x, torch.cat([weights[f"{prefix}.experts.{expert}.{kind}.weight"] for expert in range(count)]))
        for kind in ("gate_proj", "up_proj")
    )
    hidden = (F.silu(gate) * up).view(len(x), count, -1) * shares[..., None].to(x.dtype)
    down = torch.cat([weights[f"{prefix}.experts.{expert}.down_proj.weight"] for expert in range(count)], 1)
    return F.linear(hidden.flatten(1), down) + _mlp(weights, f"{prefix}.shared_experts", text, x)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _layer_norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def _rms_norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)


def _normed_linear(weights: Weights, norm: str, linear: str, x: Tensor, eps: float) -> Tensor:
    """A linear layer behind a root-mean-square norm. Each row is divided after the product and the norm's weights go
    into the matrix, because torch passes over `x` a dozen times for the norm and its gradient."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    matrix = weights[f"{linear}.weight"] * weights[f"{norm}.weight"]
    return F.linear(x, matrix) * (length * length / x.shape[-1] + eps).rsqrt()
