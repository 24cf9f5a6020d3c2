# SPDX-License-Identifier: Apache-2.0
"""Cut a list of images into forwards of bounded size, so that many images never mean out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from kimi_triton.config import VisionConfig
from kimi_triton.errors import ConfigError

INT32_MAX = 2**31 - 1


def pack_images(num_patches: Sequence[int], max_patches: int) -> list[range]:
    """Patches of each image -> runs of image indices, one run for each forward, order kept.

    A run has at most `max_patches` patches; an image above that is a run of its own.
    """
    packs: list[range] = []
    start = used = 0
    for index, patches in enumerate(num_patches):
        if index > start and used + patches > max_patches:
            packs.append(range(start, index))
            start, used = index, 0
        used += patches
    if start < len(num_patches):
        packs.append(range(start, len(num_patches)))
    return packs


def check_max_patches(max_patches: int, config: VisionConfig) -> None:
    """Refuse a forward whose widest activation has more elements than a kernel with 32-bit offsets can reach."""
    widest = max(3 * config.hidden_size, config.intermediate_size)
    limit = INT32_MAX // widest
    if not 1 <= max_patches <= limit:
        raise ConfigError(f"max_patches_per_forward is {max_patches}, expected 1 to {limit} for a width of {widest}")
