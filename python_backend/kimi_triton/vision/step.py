# SPDX-License-Identifier: Apache-2.0
"""The vision step: checks requests, encodes the images of all of them together, answers each in order.

torch is imported after the process has chosen its device, so nothing here imports it at the top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kimi_triton.config import VisionConfig
from kimi_triton.errors import InvalidRequest, KimiError
from kimi_triton.vision.grids import Grid, check_grids, num_patches

if TYPE_CHECKING:
    from torch import Tensor

    from kimi_triton.triton_io import StepOptions

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


class Encoder(Protocol):
    """Whatever turns images into rows: one model in this process, or a group of worker processes."""

    def encode(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> Sequence[Tensor | KimiError]:
        """(t * h * w, 3, 14, 14) uint8 on the CPU for each image -> its rows, or its error, in order."""

    def stop(self) -> None: ...


class VisionStep:
    """One encoder behind request checks. `encode_batch` may be called from several threads if the encoder may."""

    def __init__(self, encoder: Encoder, config: VisionConfig) -> None:
        self._encoder = encoder
        self._config = config

    @classmethod
    def from_triton(cls, options: StepOptions) -> VisionStep:
        """Load the encoder that the step's parameters describe. Raises ConfigError."""
        from kimi_triton.vision.local import load_local_encoder

        encoder = load_local_encoder(
            options.path("checkpoint"),
            dtype=options.text("dtype", "auto"),
            max_patches_per_forward=options.integer("max_patches_per_forward", 16384),
        )
        return cls(encoder, encoder.config)

    def encode_batch(self, batch: Sequence[VisionInputs]) -> list[VisionOutputs | KimiError]:
        """Outputs or the error of each request, in order; one that is wrong does not touch the others."""
        checked = [self._check(inputs) for inputs in batch]
        images: list[Tensor] = []
        grids: list[Grid] = []
        for inputs, found in zip(batch, checked, strict=True):
            if not isinstance(found, KimiError):
                images += split_images(inputs.pixel_values, found)
                grids += found
        encoded = iter(self._encoder.encode(images, grids) if images else [])
        return [
            found if isinstance(found, KimiError) else self._outputs([next(encoded) for _ in found])
            for found in checked
        ]

    def stop(self) -> None:
        self._encoder.stop()

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

    def _outputs(self, images: list[Tensor | KimiError]) -> VisionOutputs | KimiError:
        import torch

        for index, image in enumerate(images):
            if isinstance(image, KimiError):
                return type(image)(f"image {index}: {image}")
        rows = [image for image in images if not isinstance(image, KimiError)]
        empty = torch.empty(0, self._config.text_hidden_size, dtype=torch.bfloat16)
        image_embeds = torch.cat([empty, *(image.to("cpu", torch.bfloat16) for image in rows)])
        return VisionOutputs(image_embeds, np.zeros(len(rows), np.bool_))


def split_images(pixel_values: npt.NDArray[np.uint8], grids: Sequence[Grid]) -> list[Tensor]:
    """(num_patches, 3, 14, 14) of a request -> one view for each image."""
    import torch

    return list(torch.split(torch.from_numpy(pixel_values), [num_patches(grid) for grid in grids])) if grids else []
