# SPDX-License-Identifier: Apache-2.0
"""Load the whole vision model into this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.config import VisionConfig
from kimi_triton.errors import KimiError
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.progress import progress_printer
from kimi_triton.vision.encoder import LocalEncoder
from kimi_triton.vision.grids import Grid
from kimi_triton.vision.load import load_vision_model, vision_dtype


class InProcessEncoder:
    """A LocalEncoder with a name for its sizes and an end."""

    def __init__(self, encoder: LocalEncoder, config: VisionConfig) -> None:
        self._encoder = encoder
        self.config = config

    def encode(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> Sequence[Tensor | KimiError]:
        return self._encoder.encode(images, grids)

    def stop(self) -> None:
        """Nothing outlives the process."""


def load_local_encoder(
    folder: Path,
    *,
    dtype: str,
    max_patches_per_forward: int,
    device: str = "cpu",
    on_progress: Callable[[int, int], None] | None = None,
) -> InProcessEncoder:
    """Raises ConfigError. `dtype` is auto (as stored), bfloat16 or float32."""
    checkpoint = Checkpoint(folder)
    settings = ImageSettings.from_checkpoint(folder, checkpoint.config.family)
    model = load_vision_model(
        checkpoint,
        torch.device(device),
        compute_dtype(checkpoint, dtype),
        settings.image_mean,
        settings.image_std,
        on_progress or progress_printer("moonvit"),
    )
    encoder = LocalEncoder(model, torch.device(device), max_patches_per_forward)
    return InProcessEncoder(encoder, checkpoint.config.vision)


def compute_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """auto follows the tower's weights: float32 stays, half precision becomes bfloat16."""
    if name != "auto":
        return vision_dtype(name)
    stored = checkpoint.tensors["vision_tower.patch_embed.proj.weight"].dtype
    return torch.float32 if stored == "F32" else torch.bfloat16
