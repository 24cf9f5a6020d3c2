# SPDX-License-Identifier: Apache-2.0
"""What multi-head latent attention remembers of each token, kept for many requests side by side.

One request owns one row. A token costs kv_lora_rank + qk_rope_head_dim numbers per layer, whatever the number of heads:
the compressed latent and the one rotary key that all heads share. Rows are padded to the longest one and grow by
doubling; `clear` leaves zeros behind, so that no value of a finished request (it may be NaN) reaches a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_CAPACITY = 256  # tokens


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request in a step: `length` new ones behind `start` that are cached already."""

    row: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class LatentCache:
    """(rows, capacity, width) per layer."""

    def __init__(self, num_layers: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._layers = [torch.zeros(0, 0, width, device=device, dtype=dtype) for _ in range(num_layers)]

    def layer(self, index: int) -> Tensor:
        return self._layers[index]

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for `rows` requests of up to `capacity` tokens; nothing that is cached moves."""
        old_rows, old_capacity, width = self._layers[0].shape
        if rows <= old_rows and capacity <= old_capacity:
            return
        rows = max(rows, old_rows)
        if capacity > old_capacity:  # doubled, so that growing token by token copies each token a few times only
            capacity = max(capacity, 2 * old_capacity, SMALLEST_CAPACITY)
        capacity = max(capacity, old_capacity)
        for index, old in enumerate(self._layers):
            new = old.new_zeros(rows, capacity, width)
            new[:old_rows, :old_capacity] = old
            self._layers[index] = new

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` over the cleared row `target`."""
        for layer in self._layers:
            layer[target, :length] = layer[source, :length]

    def clear(self, row: int, length: int) -> None:
        for layer in self._layers:
            layer[row, :length] = 0


class CacheStep:
    """One forward pass over a cache: where its tokens are written and what they may look at.

    The first `num_decode` segments are single tokens and are attended to together; each other one goes alone.
    """

    def __init__(self, cache: LatentCache, segments: Sequence[Segment], num_decode: int) -> None:
        self.num_decode = num_decode
        self.prefill = tuple(segments[num_decode:])
        self._cache = cache
        rows = [segment.row for segment in segments for _ in range(segment.length)]
        positions = [position for segment in segments for position in range(segment.start, segment.end)]
        self._rows = torch.tensor(rows, device=cache.device)
        self.positions = torch.tensor(positions, device=cache.device)  # (num_tokens,)
        self._decode_length = max((segment.end for segment in segments[:num_decode]), default=0)
        # Requests usually fill the rows from 0 on, and then their part of the cache is a view.
        self._is_view = rows[:num_decode] == list(range(num_decode))
        seen = torch.arange(self._decode_length, device=cache.device) <= self.positions[:num_decode, None]
        self.decode_mask = ~seen.unsqueeze(1)  # (num_decode, 1, decode_length), true where a token is out of sight

    def append(self, layer_index: int, latents: Tensor) -> None:
        """Store latents (num_tokens, width) of this step."""
        self._cache.layer(layer_index)[self._rows, self.positions] = latents

    def decode_latents(self, layer_index: int) -> Tensor:
        """(num_decode, decode_length, width), padded; `decode_mask` tells what counts."""
        layer = self._cache.layer(layer_index)[:, : self._decode_length]
        return layer[: self.num_decode] if self._is_view else layer[self._rows[: self.num_decode]]

    def prefill_latents(self, layer_index: int, segment: Segment) -> Tensor:
        """(segment.end, width): all that this request has cached, the new tokens last."""
        return self._cache.layer(layer_index)[segment.row, : segment.end]
