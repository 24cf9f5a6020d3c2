# SPDX-License-Identifier: Apache-2.0
"""The weights of single experts, as stored, gathered into the fused tensors that transformers computes with.

A checkpoint names `experts.E.gate_proj.weight`; transformers wants `experts.gate_up_proj` (experts, 2 * width, hidden)
with the gate rows first, and `experts.down_proj` (experts, hidden, width).
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor

from kimi_triton.errors import ConfigError
from kimi_triton.llm.quantization import dequantize

EXPERT = re.compile(
    r"(?P<experts>.+\.mlp\.experts)\.(?P<index>\d+)\.(?P<proj>gate|up|down)_proj\.weight(?P<part>|_packed|_scale|_shape)"
)
PACKED_PARTS = frozenset(("_packed", "_scale", "_shape"))


class ExpertWeights:
    """Collects expert tensors in any order; `fused` maps a parameter's name to its tensor."""

    def __init__(self, num_experts: int, device: torch.device, dtype: torch.dtype) -> None:
        self.fused: dict[str, Tensor] = {}
        self._num_experts = num_experts
        self._device = device
        self._dtype = dtype
        self._packed: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self._num_written: dict[str, int] = defaultdict(int)

    def take(self, name: str, tensor: Tensor) -> bool:
        """False when `name` does not belong to a routed expert."""
        match = EXPERT.fullmatch(name)
        if match is None:
            return False
        experts, index, proj, part = match.group("experts", "index", "proj", "part")
        if part:
            parts = self._packed[f"{experts}.{index}.{proj}"]
            parts[part] = tensor
            if parts.keys() != PACKED_PARTS:
                return True
            del self._packed[f"{experts}.{index}.{proj}"]
            tensor = dequantize(parts["_packed"], parts["_scale"], parts["_shape"], self._dtype)
        self._write(experts, int(index), proj, tensor)
        return True

    def check_complete(self) -> None:
        """Raise ConfigError when part of a fused tensor was never written."""
        for name, written in self._num_written.items():
            expected = self._num_experts * (2 if name.endswith("gate_up_proj") else 1)
            if written != expected:
                raise ConfigError(f"{name} got {written} expert matrices, expected {expected}")
        if self._packed:
            name, parts = next(iter(self._packed.items()))
            raise ConfigError(f"{name}_proj has only {', '.join(f'weight{part}' for part in parts)}")

    def _write(self, experts: str, index: int, proj: str, weight: Tensor) -> None:
        rows, columns = weight.shape
        name = f"{experts}.down_proj" if proj == "down" else f"{experts}.gate_up_proj"
        if name not in self.fused:
            shape = (self._num_experts, rows if proj == "down" else 2 * rows, columns)
            self.fused[name] = torch.empty(shape, dtype=self._dtype, device=self._device)
        first = rows if proj == "up" else 0
        self.fused[name][index, first : first + rows] = weight.to(self._device)
        self._num_written[name] += 1
