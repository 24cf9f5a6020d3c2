# SPDX-License-Identifier: Apache-2.0
"""`make bench-cache`: the vision step's time for an image it has seen, over its time for one it has not."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from kimi_triton.vision.build import build_encoder
from kimi_triton.vision.options import VisionOptions
from kimi_triton.vision.step import VisionInputs, split_images
from tests.benchmarks.full_size import write_full_size_checkpoint
from tests.benchmarks.measure import finish, show, surroundings

GRID = (1, 32, 32)
IMAGES = 6


def main(folder: Path) -> None:
    options = VisionOptions(checkpoint=write_full_size_checkpoint(folder), dtype="bfloat16")
    encoder, _ = build_encoder(options, lambda _done, _total: None)
    encoder.encode(images(seed=99))  # the first forward of a process also warms it up
    seconds: dict[str, list[float]] = {"first": [], "repeat": []}
    for seed in range(IMAGES):
        for name in seconds:
            image = images(seed)
            start = time.perf_counter()
            (encoded,) = encoder.encode(image)
            seconds[name].append(time.perf_counter() - start)
            assert encoded.is_cached == (name == "repeat")
    show(f"one image of {GRID[1] * GRID[2]} patches", seconds)
    ratio = statistics.median(b / a for a, b in zip(seconds["first"], seconds["repeat"], strict=True))
    finish(repeat_over_first=round(ratio, 5), **surroundings(dtype="bfloat16", threads=torch.get_num_threads()))


def images(seed: int) -> list:  # type: ignore[type-arg]
    random = np.random.default_rng(seed)
    pixel_values = random.integers(0, 256, (GRID[1] * GRID[2], 3, 14, 14), dtype=np.uint8)
    digest = random.integers(0, 256, (1, 32), dtype=np.uint8)
    return split_images(VisionInputs(pixel_values, np.array([GRID]), digest), [GRID])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
