# SPDX-License-Identifier: Apache-2.0
"""Images per second of the vision tower at 1, 2 and 4 workers with one thread each, in each parallel mode.

data and tensor: worker pools, called directly. instances: Triton instances of `moonvit`, called over gRPC, because
Triton spreads the requests there. As many callers as workers send requests of 1, 4 or 16 images, each caller its next
request when the last one is answered. The headline ratios are for 8 images in one request (data, tensor) or in one
request for each of two callers (instances). Caches are off.

usage: python -m tests.benchmarks.bench_parallel CHECKPOINT_FOLDER [MODE ...]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tritonclient.grpc as grpcclient
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.layout import Parallel
from kimi_triton.vision.options import VisionOptions
from kimi_triton.workers.launch import launch_workers
from tests.benchmarks.full_size import write_full_size_checkpoint
from tests.benchmarks.measure import finish, interleaved, ratios, show, surroundings
from tests.conftest import started

WORKERS = (1, 2, 4)
IMAGES_PER_REQUEST = (1, 4, 16)
HEADLINE_IMAGES = 8
TOTAL_IMAGES = 16  # of one measurement
GRID: Grid = (1, 16, 16)
REPEATS, HEADLINE_REPEATS = 1, 5
Encode = Callable[[int], object]  # one request with so many images


def main(folder: Path, modes: Sequence[str]) -> None:
    checkpoint = write_full_size_checkpoint(folder)
    figures: dict[str, dict[str, float]] = {}
    headline: dict[str, float] = {}
    for mode in modes or ENCODERS:
        with ExitStack() as stack:
            encoders = {count: stack.enter_context(ENCODERS[mode](checkpoint, count)) for count in WORKERS}
            headline[f"{mode}_2_over_1"] = round(two_over_one(mode, encoders), 3)
            figures[mode] = images_per_second(mode, encoders)
    finish(
        **headline, images_per_second=figures, **surroundings(dtype="bfloat16", patches=num_patches(GRID), threads=1)
    )


def images_per_second(mode: str, encoders: dict[int, Encode]) -> dict[str, float]:
    """By workers and images of a request; prints the speed-up over one worker."""
    found: dict[str, float] = {}
    for images in IMAGES_PER_REQUEST:
        contenders = {
            str(count): partial(closed_loop, encode, count, images, TOTAL_IMAGES) for count, encode in encoders.items()
        }
        seconds = interleaved(contenders, REPEATS)
        show(f"{mode}, {images} images in a request, workers", seconds)
        for count in encoders:
            speed_up = ratios(seconds, "1", str(count))
            rate = TOTAL_IMAGES / min(seconds[str(count)])
            found[f"{count} x {images}"] = round(rate, 2)
            print(f"  {count} workers: {rate:.2f} images/s, {speed_up:.2f} times one worker", flush=True)
    return found


def two_over_one(mode: str, encoders: dict[int, Encode]) -> float:
    """Throughput of two workers over that of one, on HEADLINE_IMAGES equal images."""
    callers = 2 if mode == "instances" else 1
    images = HEADLINE_IMAGES // callers
    contenders = {
        str(count): partial(closed_loop, encoders[count], callers, images, HEADLINE_IMAGES) for count in (1, 2)
    }
    seconds = interleaved(contenders, HEADLINE_REPEATS)
    show(f"{mode}, {HEADLINE_IMAGES} images, workers", seconds)
    return ratios(seconds, "1", "2")


def closed_loop(encode: Encode, callers: int, images: int, total: int) -> None:
    """Send `total` images, `images` in each request, from so many callers."""
    with ThreadPoolExecutor(callers) as threads:
        for _ in threads.map(encode, [images] * (total // images)):
            pass


@contextmanager
def pool(parallel: Parallel, checkpoint: Path, workers: int) -> Iterator[Encode]:
    options = VisionOptions(
        checkpoint=checkpoint, dtype="bfloat16", parallel=parallel, num_workers=workers, num_threads=1
    )
    running = launch_workers(options, Checkpoint(checkpoint).config.vision, lambda _done, _total: None)
    pixels = torch.from_numpy(random_pixels(max(IMAGES_PER_REQUEST))).split(num_patches(GRID))

    def encode(images: int) -> None:
        encoded = running.encode(pixels[:images], [GRID] * images)
        if not all(isinstance(rows, Tensor) for rows in encoded):
            raise RuntimeError(str(encoded))

    try:
        yield encode
    finally:
        running.stop()


@contextmanager
def instances(checkpoint: Path, workers: int) -> Iterator[Encode]:
    """Triton with `workers` instances of moonvit."""
    options = {"dtype": "bfloat16", "vision_instances": workers, "vision_threads": 1, "image_cache_bytes": 0}
    with (
        tempfile.TemporaryDirectory() as folder,
        started(checkpoint, Path(folder), **options) as server,
        grpcclient.InferenceServerClient(server.grpc_url) as client,
    ):
        requests = {images: moonvit_inputs(images) for images in (*IMAGES_PER_REQUEST, HEADLINE_IMAGES // 2)}
        yield lambda images: client.infer("moonvit", requests[images])


def moonvit_inputs(images: int) -> list[grpcclient.InferInput]:
    tensors = {
        "pixel_values": random_pixels(images)[None],
        "image_grid_thw": np.array([[GRID] * images], np.int64),
        "image_digest": np.zeros((1, images, 32), np.uint8),
    }
    types = {"uint8": "UINT8", "int64": "INT64"}
    return [
        grpcclient.InferInput(name, list(array.shape), types[str(array.dtype)]).set_data_from_numpy(array)
        for name, array in tensors.items()
    ]


def random_pixels(images: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(0).integers(256, size=(images * num_patches(GRID), 3, 14, 14), dtype=np.uint8)


ENCODERS = {"data": partial(pool, "data"), "tensor": partial(pool, "tensor"), "instances": instances}

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
