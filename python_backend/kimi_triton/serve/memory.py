# SPDX-License-Identifier: Apache-2.0
"""How much shared memory the steps of a server can come to need: tensors cross between processes there."""

from __future__ import annotations

import os
from pathlib import Path

from kimi_triton.config import CheckpointConfig
from kimi_triton.errors import ConfigError
from kimi_triton.serve.options import ServeOptions
from kimi_triton.serve.placement import plan_vision

SHM = Path("/dev/shm")
PATCH_BYTES = 3 * 14 * 14  # uint8
PATCHES_PER_ROW = 4
ROW_ITEM_BYTES = 2  # bfloat16
SLACK_BYTES = 64 * 1024 * 1024  # segments of 1 MB at least, tokens, texts
MIB = 1024 * 1024


def shm_need(options: ServeOptions, config: CheckpointConfig) -> int:
    """Bytes of /dev/shm in the worst case. Triton's segments grow to the most they ever held and never shrink.

    All pixels on their way (`max_pixel_bytes`) may be in each preprocess process, in each vision process, and as rows
    of `image_embeds` in the latter and in the language model's.
    """
    pixels = options.max_pixel_bytes
    rows = pixels // PATCH_BYTES // PATCHES_PER_ROW * config.text_hidden_size * ROW_ITEM_BYTES
    num_vision = len(plan_vision(options, config.vision).devices)
    return (options.preprocess_instances + num_vision) * pixels + (num_vision + 1) * rows + SLACK_BYTES


def check_shm(options: ServeOptions, config: CheckpointConfig, folder: Path = SHM) -> str:
    """What is needed and what is free. Raises ConfigError when it is too little."""
    need = -(-shm_need(options, config) // MIB)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize // MIB
    if free < need:
        smaller = options.max_pixel_bytes * free // need // 2
        raise ConfigError(
            f"{folder} has {free} MiB free, requests can come to need {need} MiB: give the container "
            f"--shm-size={need}m, or say --max-pixel-bytes {smaller}"
        )
    return f"{folder} has {free} MiB free, {need} MiB can come to be needed"


def free_memory() -> int:
    """Bytes of host memory that new processes can have."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
