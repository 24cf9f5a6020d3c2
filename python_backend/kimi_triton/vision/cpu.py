# SPDX-License-Identifier: Apache-2.0
"""bf16 on CPUs: weights packed once for oneDNN, GELU fused into the product before it, the MLP in blocks of rows.

oneDNN otherwise reorders a weight at every call. torch's compiler uses the same two operators; they have no other name.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from kimi_triton.vision.merger import Projector
from kimi_triton.vision.moonvit import MLP, EncoderBlock

PACK_ROWS = 1024  # rows of input that the packed layout is chosen for; others work as well
MLP_ROWS = 256  # of a width of 4304: the wide activation of a block stays in the caches of two cores


class PackedLinear(nn.Module):
    """A Linear, and the GELU behind it if there is one, in one oneDNN call."""

    def __init__(self, linear: nn.Linear, gelu: nn.GELU | None = None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACK_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = "gelu" if gelu else "none"
        self._approximate = gelu.approximate if gelu else ""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(rows, in_features) -> (rows, out_features)."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden_states, self._weight, self._bias, self._activation, [], self._approximate
        )
        return result


class BlockedMLP(nn.Module):
    """A module applied to blocks of rows, which must not depend on each other."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(num_patches, hidden_size) -> (num_patches, hidden_size)."""
        projected = torch.empty_like(hidden_states)
        for rows, out in zip(torch.split(hidden_states, MLP_ROWS), torch.split(projected, MLP_ROWS), strict=True):
            out.copy_(self.mlp(rows))
        return projected


def pack_linears(model: nn.Module) -> None:
    """Replace every bf16 Linear in `model`, shards included, and free its weight.

    Does nothing on a CPU for which oneDNN has no bf16.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for parent in list(model.modules()):
        if isinstance(parent, MLP):
            _fuse_gelu(parent, "fc0", parent.fc0, parent.act)
        if isinstance(parent, Projector):
            _fuse_gelu(parent, "linear_1", parent.linear_1, parent.act)
        for name, child in parent.named_children():
            if _is_plain(child):
                parent.add_module(name, PackedLinear(child))
    for block in list(model.modules()):
        # A shard's fc1 talks to the other ranks, which should happen once for a whole pack.
        if isinstance(block, EncoderBlock) and isinstance(block.mlp.fc1, PackedLinear):
            block.add_module("mlp", BlockedMLP(block.mlp))


def _fuse_gelu(parent: nn.Module, name: str, linear: nn.Module, act: nn.GELU) -> None:
    if _is_plain(linear):
        parent.add_module(name, PackedLinear(linear, act))
        parent.add_module("act", nn.Identity())


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.dtype == torch.bfloat16
