# SPDX-License-Identifier: Apache-2.0
"""One forward pass of the language model for tokens of many requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kimi_triton.llm.latent_cache import CacheStep, LatentCache, Segment

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM


class Decoder(Protocol):
    """What the engine needs of a model. Rows belong to requests; the caller keeps them apart."""

    device: torch.device
    vocab_size: int

    def embed(self, token_ids: Tensor) -> Tensor:
        """(n,) int64 -> (n, hidden)."""

    def forward(self, inputs_embeds: Tensor, segments: Sequence[Segment], num_decode: int) -> Tensor:
        """(num_tokens, hidden) of all `segments` in order -> (num_segments, vocab) fp32, logits of each last token.

        The first `num_decode` segments are single tokens.
        """

    def reserve(self, rows: int, capacity: int) -> None: ...

    def move(self, source: int, target: int, length: int) -> None: ...

    def clear(self, row: int, length: int) -> None: ...


class DeepseekDecoder:
    """The Decoder around transformers' modules and a LatentCache."""

    def __init__(self, model: DeepseekV3ForCausalLM) -> None:
        self._model = model
        config, weight = model.config, model.model.embed_tokens.weight
        self.device = weight.device
        self.vocab_size: int = config.vocab_size
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self._cache = LatentCache(config.num_hidden_layers, width, weight.device, weight.dtype)

    @property
    def cache_bytes_per_token(self) -> int:
        layers = self._model.config.num_hidden_layers
        return layers * self._cache.layer(0).shape[-1] * self._cache.layer(0).element_size()

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._model.model.embed_tokens(token_ids)  # type: ignore[no-any-return]

    def forward(self, inputs_embeds: Tensor, segments: Sequence[Segment], num_decode: int) -> Tensor:
        step = CacheStep(self._cache, segments, num_decode)
        decoder = self._model.model
        hidden_states = inputs_embeds.unsqueeze(0)
        position_embeddings = decoder.rotary_emb(hidden_states, step.positions.unsqueeze(0))
        for layer in decoder.layers:
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings, cache=step)
        lengths = torch.tensor([segment.length for segment in segments])
        last = (lengths.cumsum(0) - 1).to(self.device)
        return self._model.lm_head(decoder.norm(hidden_states[0, last])).float()  # type: ignore[no-any-return]

    def reserve(self, rows: int, capacity: int) -> None:
        self._cache.reserve(rows, capacity)

    def move(self, source: int, target: int, length: int) -> None:
        self._cache.move(source, target, length)

    def clear(self, row: int, length: int) -> None:
        self._cache.clear(row, length)
