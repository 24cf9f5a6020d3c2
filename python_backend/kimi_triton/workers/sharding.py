# SPDX-License-Identifier: Apache-2.0
"""Make a finished vision model one of several tensor-parallel shards. The model itself never learns of it.

Column split (each rank computes some outputs): wqkv by heads, fc0. Row split (each rank sums over some inputs, then all
sums are added): wo, fc1. Everything else, the projector included, is computed by every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kimi_triton.vision.layout import check_shards
from kimi_triton.vision.moonvit import EncoderBlock, VisionModel

AllReduce = Callable[[Tensor], None]  # sums a tensor over all ranks, in place


def apply_tensor_parallel(model: VisionModel, tp_rank: int, tp_size: int, all_reduce: AllReduce) -> None:
    """Keep only what rank `tp_rank` of `tp_size` computes."""
    check_shards(model.config, tp_size)
    for block in model.vision_tower.encoder.blocks:
        assert isinstance(block, EncoderBlock)
        block.wqkv = column_shard(block.wqkv, 3, tp_rank, tp_size)
        block.wo = RowShard(block.wo, tp_rank, tp_size, all_reduce)  # type: ignore[assignment]
        block.mlp.fc0 = column_shard(block.mlp.fc0, 1, tp_rank, tp_size)
        block.mlp.fc1 = RowShard(block.mlp.fc1, tp_rank, tp_size, all_reduce)  # type: ignore[assignment]


def column_shard(linear: nn.Linear, num_parts: int, tp_rank: int, tp_size: int) -> nn.Linear:
    """The outputs of one rank. wqkv has three parts (queries, keys, values) of which each rank needs its heads."""
    weight = linear.weight.view(num_parts, tp_size, -1, linear.in_features)[:, tp_rank].flatten(0, 1)
    return _linear(weight, linear.bias.view(num_parts, tp_size, -1)[:, tp_rank].flatten())


class RowShard(nn.Module):
    """The inputs of one rank. The bias is added once, after the sum over ranks."""

    def __init__(self, linear: nn.Linear, tp_rank: int, tp_size: int, all_reduce: AllReduce) -> None:
        super().__init__()
        self.product = _linear(linear.weight.view(linear.out_features, tp_size, -1)[:, tp_rank], None)
        self.bias = linear.bias
        self._all_reduce = all_reduce

    def forward(self, hidden_states: Tensor) -> Tensor:
        summed: Tensor = self.product(hidden_states)
        self._all_reduce(summed)
        return summed.add_(self.bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer with copies of these weights, so that the whole ones can be freed."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear
