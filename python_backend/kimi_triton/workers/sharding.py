# SPDX-License-Identifier: Apache-2.0
"""Make a finished vision model one of several tensor-parallel shards. The model itself never learns of it.

Column split (each rank computes some outputs): wqkv by heads, fc0. Row split (each rank sums over some inputs, then all
sums are added): wo, fc1. Everything else, the projector included, is computed by every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kimi_triton.vision.layout import check_shards
from kimi_triton.vision.moonvit import EncoderBlock, VisionModel

AllReduce = Callable[[Tensor], None]  # sums a tensor over all ranks, in place


def apply_tensor_parallel(model: VisionModel, tp_rank: int, tp_size: int, all_reduce: AllReduce) -> None:
    """Keep only what rank `tp_rank` of `tp_size` computes."""
    check_shards(model.config, tp_size)
    for block in model.vision_tower.encoder.blocks:
        assert isinstance(block, EncoderBlock)
        block.wqkv = column_shard(block.wqkv, 3, tp_rank, tp_size)
        block.wo = RowShard(block.wo, tp_rank, tp_size, all_reduce)
        block.mlp.fc0 = column_shard(block.mlp.fc0, 1, tp_rank, tp_size)
        block.mlp.fc1 = RowShard(block.mlp.fc1, tp_rank, tp_size, all_reduce)


def column_shard(linear: nn.Linear, num_parts: int, tp_rank: int, tp_size: int) -> nn.Linear:
    """The outputs of one rank. wqkv has three parts (queries, keys, values) of which each rank needs its heads."""
    weight = linear.weight.view(num_parts, tp_size, -1, linear.in_features)[:, tp_rank].flatten(0, 1).clone()
    bias = linear.bias.view(num_parts, tp_size, -1)[:, tp_rank].flatten().clone()
    with torch.device("meta"):
        shard = nn.Linear(linear.in_features, len(bias))
    shard.load_state_dict({"weight": weight, "bias": bias}, assign=True)
    return shard.requires_grad_(False)


class RowShard(nn.Linear):
    """The inputs of one rank. The bias is added once, after the sum over ranks."""

    def __init__(self, linear: nn.Linear, tp_rank: int, tp_size: int, all_reduce: AllReduce) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features // tp_size, linear.out_features)
        weight = linear.weight.view(linear.out_features, tp_size, -1)[:, tp_rank].clone()
        self.load_state_dict({"weight": weight, "bias": linear.bias}, assign=True)
        self.requires_grad_(False)
        self._all_reduce = all_reduce

    def forward(self, hidden_states: Tensor) -> Tensor:
        summed = F.linear(hidden_states, self.weight)
        self._all_reduce(summed)
        return summed.add_(self.bias)
