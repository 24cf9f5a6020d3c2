# SPDX-License-Identifier: Apache-2.0
"""Spread images over workers by patch count."""

from __future__ import annotations

from collections.abc import Sequence


def assign_images(num_patches: Sequence[int], loads: Sequence[int]) -> list[list[int]]:
    """Patches of each image, patches each worker is busy with already -> indices of the images for each worker.

    Largest image first, each to the least loaded worker, lowest worker on ties: the rule of vLLM and SGLang. It counts
    patches although attention is quadratic in them.
    """
    loads = list(loads)
    assigned: list[list[int]] = [[] for _ in loads]
    for image in sorted(range(len(num_patches)), key=lambda image: -num_patches[image]):
        worker = loads.index(min(loads))
        assigned[worker].append(image)
        loads[worker] += num_patches[image]
    return assigned
