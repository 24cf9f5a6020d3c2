# SPDX-License-Identifier: Apache-2.0
"""What makes a loaded model faster on a GPU: compiled blocks, recorded layers."""

from __future__ import annotations

import torch

from kimi_triton.errors import ConfigError
from kimi_triton.vision.attention import sdpa_attention
from kimi_triton.vision.graphs import SIZES, GraphedEncoder, cuda_record
from kimi_triton.vision.moonvit import VisionModel


def speed_up(model: VisionModel, *, max_patches: int, use_graphs: bool, use_compile: bool) -> None:
    """Change `model` in place. Graphs need a GPU and a varlen attention kernel, and are left out without.

    Raises ConfigError when blocks shall be compiled without such a kernel: one attention call for each image would be
    compiled again for each mix of sizes.
    """
    encoder = model.vision_tower.encoder
    has_kernel = encoder.blocks[0].attention is not sdpa_attention
    if use_compile:
        if not has_kernel:
            raise ConfigError("vision compile needs a GPU with a varlen attention kernel (bfloat16)")
        for block in encoder.blocks:
            block.forward = torch.compile(block.forward, dynamic=True)  # hooks stay outside
    if use_graphs and has_kernel:
        graphed = GraphedEncoder(encoder, [size for size in SIZES if size <= max_patches], cuda_record())
        weight = model.vision_tower.patch_embed.proj.weight
        graphed.record_all(weight.new_zeros(1, model.config.hidden_size))
        model.vision_tower.encoder = graphed  # type: ignore[assignment]
