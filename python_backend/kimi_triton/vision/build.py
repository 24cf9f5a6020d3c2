# SPDX-License-Identifier: Apache-2.0
"""Put the encoder of one vision step together: in this process or in workers, behind the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.config import VisionConfig
from kimi_triton.vision.local import compute_dtype, load_in_process
from kimi_triton.vision.options import VisionOptions
from kimi_triton.vision.remembering import Encoder, RememberingEncoder
from kimi_triton.workers.launch import launch_workers


def build_encoder(
    options: VisionOptions, on_progress: Callable[[int, int], None]
) -> tuple[RememberingEncoder, VisionConfig]:
    """Raises ConfigError. This process must have chosen its GPU, or none, before."""
    checkpoint = Checkpoint(options.checkpoint)
    encoder: Encoder
    if options.parallel == "instances":
        encoder = load_in_process(options, on_progress)
    else:
        torch.set_num_threads(1)  # this process only copies; the cores belong to the workers
        encoder = launch_workers(options, checkpoint.config.vision, on_progress)
    scope = f"{weights_fingerprint(checkpoint)} {compute_dtype(checkpoint, options.dtype)} ".encode()
    return RememberingEncoder(encoder, scope, options.image_cache_bytes), checkpoint.config.vision


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Tells weights apart without reading them: names, dtypes, shapes, and size and time of the files."""
    digest = hashlib.sha256()
    for name in sorted(checkpoint.names("vision_tower.", f"{checkpoint.config.vision.projector_prefix}.")):
        info = checkpoint.tensors[name]
        status = info.file.stat()
        digest.update(f"{name} {info.dtype} {info.shape} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
