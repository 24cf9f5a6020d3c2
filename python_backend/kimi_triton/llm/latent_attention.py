# SPDX-License-Identifier: Apache-2.0
"""Attention of DeepSeek-V3 over a cache of latents, for tokens of many requests in one pass.

transformers' own forward expands the latents of all cached tokens into keys and values of every head at every step:
for one new token that is hundreds of times more work than attention itself. A decoding token is therefore taken into
the latent space instead. With k = W_k c and v = W_v c for a latent c, q.k = (W_k^T q).c and sum p v = W_v (sum p c), so
all heads attend to one shared "key" per token. Prompts, where many queries share one expansion, are expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, apply_rotary_pos_emb_interleave

from kimi_triton.llm.latent_cache import CacheStep, Segment


class LatentAttention(DeepseekV3Attention):
    """transformers' parameters and projections, our way through the cache."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: CacheStep, **_: Any
    ) -> tuple[Tensor, None]:
        """(1, num_tokens, hidden) -> (1, num_tokens, hidden), None; the second value stands for attention weights."""
        queries, latents = self._project(hidden_states, position_embeddings)
        cache.append(self.layer_idx, latents)
        parts = []
        if cache.num_decode:
            parts.append(self._attend_latents(queries[: cache.num_decode], cache))
        first = cache.num_decode
        for segment in cache.prefill:
            parts.append(self._attend_expanded(queries[first : first + segment.length], cache, segment))
            first += segment.length
        attended = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self.o_proj(attended.flatten(1)).unsqueeze(0), None

    def _project(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries (num_tokens, num_heads, qk_head_dim) and latents (num_tokens, kv_lora_rank + qk_rope_head_dim)."""
        queries = self._queries(hidden_states).view(1, -1, self.num_heads, self.qk_head_dim).transpose(1, 2)
        q_nope, q_rope = queries[..., : self.qk_nope_head_dim], queries[..., self.qk_nope_head_dim :]
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        latent, k_rope = compressed[..., : self.kv_lora_rank], compressed[..., self.kv_lora_rank :]
        cos, sin = position_embeddings
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope.unsqueeze(1), cos, sin)  # type: ignore[no-untyped-call]
        queries = torch.cat((q_nope, q_rope), dim=-1)[0].transpose(0, 1)
        return queries, torch.cat((self.kv_a_layernorm(latent)[0], k_rope[0, 0]), dim=-1)

    def _queries(self, hidden_states: Tensor) -> Tensor:
        if self.q_proj is not None:
            return self.q_proj(hidden_states)  # type: ignore[no-any-return]
        assert self.q_a_proj is not None
        assert self.q_a_layernorm is not None
        assert self.q_b_proj is not None
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))  # type: ignore[no-any-return]

    def _attend_latents(self, queries: Tensor, cache: CacheStep) -> Tensor:
        """(n, num_heads, qk_head_dim), one token of each request -> (n, num_heads, v_head_dim)."""
        by_head = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        key_weight, value_weight = by_head[:, : self.qk_nope_head_dim], by_head[:, self.qk_nope_head_dim :]
        q_nope, q_rope = queries[..., : self.qk_nope_head_dim], queries[..., self.qk_nope_head_dim :]
        q_latent = torch.bmm(q_nope.transpose(0, 1), key_weight).transpose(0, 1)
        latents = cache.decode_latents(self.layer_idx)
        scores = torch.bmm(torch.cat((q_latent, q_rope), dim=-1), latents.transpose(1, 2)) * self.scaling
        weights = scores.masked_fill(cache.decode_mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
        attended = torch.bmm(weights.to(latents.dtype), latents[..., : self.kv_lora_rank])
        return torch.bmm(attended.transpose(0, 1), value_weight.transpose(1, 2)).transpose(0, 1)

    def _attend_expanded(self, queries: Tensor, cache: CacheStep, segment: Segment) -> Tensor:
        """(length, num_heads, qk_head_dim), tokens of one request -> (length, num_heads, v_head_dim)."""
        latents = cache.prefill_latents(self.layer_idx, segment)[None, None]
        keys, values = self.expand_kv(latents[..., : self.kv_lora_rank], latents[..., self.kv_lora_rank :])
        value_width = values.shape[-1]
        # The fused kernels want values as wide as keys; without them the scores of all heads would be stored.
        values = functional.pad(values, (0, max(self.qk_head_dim - value_width, 0)))
        mask = None
        if segment.start:
            mask = torch.ones(segment.length, segment.end, dtype=torch.bool, device=queries.device).tril(segment.start)
        attended = functional.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0), keys, values, mask, is_causal=mask is None, scale=self.scaling
        )
        return attended[0, ..., :value_width].transpose(0, 1)
