# SPDX-License-Identifier: Apache-2.0
"""The whole vision model in this process, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import KimiError
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.vision.encoder import LocalEncoder
from kimi_triton.vision.gpu import speed_up
from kimi_triton.vision.grids import Grid
from kimi_triton.vision.load import load_vision_model, vision_dtype
from kimi_triton.vision.moonvit import VisionModel
from kimi_triton.vision.options import VisionOptions
from kimi_triton.vision.work_log import WorkLog


class InProcessEncoder:
    """A LocalEncoder as the vision step wants it."""

    num_restarts = 0

    def __init__(self, encoder: LocalEncoder, work_log: WorkLog) -> None:
        self._encoder = encoder
        self.work_log = work_log

    def encode(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> Sequence[Tensor | KimiError]:
        with self.work_log.timed(grids):
            return self._encoder.encode(images, grids)

    def stop(self) -> None:
        """Nothing outlives the process."""


def load_in_process(options: VisionOptions, on_progress: Callable[[int, int], None]) -> InProcessEncoder:
    """Raises ConfigError. The process must see no GPU but its own, if any."""
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    device = torch.device("cuda:0" if options.devices else "cpu")
    model = load_from_folder(options.checkpoint, device, options.dtype, on_progress)
    speed_up(
        model,
        max_patches=options.max_patches_per_forward,
        use_graphs=options.use_graphs,
        use_compile=options.use_compile,
    )
    encoder = LocalEncoder(model, device, options.max_patches_per_forward)
    return InProcessEncoder(encoder, WorkLog(options.max_patches_per_forward))


def load_from_folder(
    folder: Path, device: torch.device, dtype: str, on_progress: Callable[[int, int], None]
) -> VisionModel:
    """A checkpoint folder's tower and projector; `dtype` is auto, bfloat16 or float32. Raises ConfigError."""
    checkpoint = Checkpoint(folder)
    settings = ImageSettings.from_checkpoint(folder, checkpoint.config.family)
    computed = compute_dtype(checkpoint, dtype)
    return load_vision_model(checkpoint, device, computed, settings.image_mean, settings.image_std, on_progress)


def compute_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """auto follows the tower's weights: float32 stays, half precision becomes bfloat16."""
    if name != "auto":
        return vision_dtype(name)
    stored = checkpoint.tensors["vision_tower.patch_embed.proj.weight"].dtype
    return torch.float32 if stored == "F32" else torch.bfloat16
