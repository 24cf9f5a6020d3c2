# SPDX-License-Identifier: Apache-2.0
"""The vision step: checks requests, encodes the images of all of them together, answers each in order.

torch is imported after the process has chosen its device, so nothing here imports it at the top.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kimi_triton.config import VisionConfig
from kimi_triton.errors import InvalidRequest, KimiError
from kimi_triton.progress import progress_printer
from kimi_triton.vision.grids import Grid, check_grids, num_patches
from kimi_triton.vision.metrics import VISION_METRICS, VisionMetrics
from kimi_triton.vision.options import VisionOptions

if TYPE_CHECKING:
    from torch import Tensor

    from kimi_triton.triton_io import StepOptions
    from kimi_triton.vision.remembering import EncodedImage, Image, RememberingEncoder

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class VisionInputs:
    """One request; without images every tensor has zero rows."""

    pixel_values: npt.NDArray[np.uint8]  # (num_patches, 3, 14, 14)
    image_grid_thw: npt.NDArray[np.int64]  # (num_images, 3)
    image_digest: npt.NDArray[np.uint8]  # (num_images, 32)


@dataclass(frozen=True, slots=True, eq=False)
class VisionOutputs:
    """Rows for the language model, image after image, and which images cost no encoding."""

    image_embeds: Tensor  # (num_image_tokens, text_hidden_size) bfloat16, on the CPU
    image_cached: npt.NDArray[np.bool_]  # (num_images,)


class VisionStep:
    """An encoder behind request checks."""

    def __init__(
        self, encoder: RememberingEncoder, config: VisionConfig, metrics: VisionMetrics, batches_at_once: int = 1
    ) -> None:
        self.batches_at_once = batches_at_once  # calls of `encode_batch`, from different threads, that are worth it
        self._encoder = encoder
        self._config = config
        self._metrics = metrics
        self._counting = threading.Lock()

    @classmethod
    def from_triton(cls, options: StepOptions) -> VisionStep:
        """Load what the step's parameters describe, on the devices they name. Raises ConfigError."""
        vision_options = VisionOptions.from_triton(options, os.environ)
        owned = vision_options.devices if vision_options.parallel == "instances" else ()  # workers have their own
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(owned)

        from kimi_triton.vision.build import build_encoder

        encoder, config = build_encoder(vision_options, progress_printer(options.model_name))
        batches_at_once = vision_options.num_workers if vision_options.parallel == "data" else 1
        return cls(encoder, config, VisionMetrics(options.metrics(VISION_METRICS)), batches_at_once)

    def encode_batch(self, batch: Sequence[VisionInputs]) -> list[VisionOutputs | KimiError]:
        """Outputs or the error of each request, in order; one that is wrong does not touch the others."""
        checked = [self._check(inputs) for inputs in batch]
        images: list[Image] = []
        for inputs, grids in zip(batch, checked, strict=True):
            if not isinstance(grids, KimiError):
                images += split_images(inputs, grids)
        encoded = self._encoder.encode(images)
        self._count(images, encoded)
        rest = iter(encoded)
        return [grids if isinstance(grids, KimiError) else self._outputs(rest, len(grids)) for grids in checked]

    def stop(self) -> None:
        self._encoder.stop()
        del self._metrics  # Triton's stub dies of metrics that are still there when it ends

    def _check(self, inputs: VisionInputs) -> list[Grid] | InvalidRequest:
        """The grids of a request whose tensors fit each other."""
        grids: list[Grid] = [(t, h, w) for t, h, w in inputs.image_grid_thw.tolist()]
        if inputs.image_digest.shape != (len(grids), DIGEST_BYTES):
            return InvalidRequest(
                f"image_digest has shape {list(inputs.image_digest.shape)}, "
                f"image_grid_thw describes {len(grids)} images: expected {[len(grids), DIGEST_BYTES]}"
            )
        try:
            check_grids(grids, len(inputs.pixel_values), self._config)
        except InvalidRequest as exc:
            return exc
        return grids

    def _count(self, images: Sequence[Image], encoded: Sequence[EncodedImage]) -> None:
        if not images:
            return
        with self._counting:
            self._metrics.count_images((image.grid for image in images), (image.is_cached for image in encoded))
            self._metrics.count_work(self._encoder.work_log.drain())
            self._metrics.publish(
                cache_bytes=self._encoder.cache.num_bytes,
                cache_mismatches=self._encoder.cache.num_mismatches,
                worker_restarts=self._encoder.num_restarts,
            )

    def _outputs(self, encoded: Iterator[EncodedImage], num_images: int) -> VisionOutputs | KimiError:
        """Join the next `num_images` images, or tell the first error among them."""
        import torch

        images = [next(encoded) for _ in range(num_images)]
        rows = [torch.empty(0, self._config.text_hidden_size, dtype=torch.bfloat16)]
        for index, image in enumerate(images):
            if isinstance(image.rows, KimiError):
                return type(image.rows)(f"image {index}: {image.rows}")
            rows.append(image.rows)
        image_cached = np.array([image.is_cached for image in images], dtype=np.bool_)
        return VisionOutputs(rows[1] if num_images == 1 else torch.cat(rows), image_cached)


def split_images(inputs: VisionInputs, grids: Sequence[Grid]) -> list[Image]:
    """The images of one request, as views of its pixels."""
    import torch

    from kimi_triton.vision.remembering import Image

    if not grids:
        return []
    pixels = torch.split(torch.from_numpy(inputs.pixel_values), [num_patches(grid) for grid in grids])
    return [
        Image(digest.tobytes() + repr(grid).encode(), pixel_values, grid)
        for digest, pixel_values, grid in zip(inputs.image_digest, pixels, grids, strict=True)
    ]
