# SPDX-License-Identifier: Apache-2.0
"""Many images through one model on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_triton.errors import InvalidRequest
from kimi_triton.vision.cpu import pack_linears
from kimi_triton.vision.grids import Grid, num_image_tokens, num_patches
from kimi_triton.vision.moonvit import VisionModel
from kimi_triton.vision.packing import check_max_patches, pack_images

MAX_PATCHES_PER_FORWARD = 16_384


class LocalEncoder:
    """Encodes images in as few forwards as `max_patches_per_forward` allows."""

    def __init__(
        self, model: VisionModel, device: torch.device, max_patches_per_forward: int = MAX_PATCHES_PER_FORWARD
    ) -> None:
        """Takes `model`, which is whole or a shard, and makes its layers fast on a CPU."""
        check_max_patches(max_patches_per_forward, model.config)
        if device.type == "cpu":
            pack_linears(model)
        self._model = model
        self._device = device
        self._max_patches = max_patches_per_forward

    @torch.inference_mode()
    def encode(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor | InvalidRequest]:
        """Encode the pixel_values of each image, (t * h * w, 3, 14, 14) uint8 on the CPU, which fit its grid.

        Returns for each image, in order, its image_embeds (num_image_tokens, text_hidden_size) on the encoder's device,
        or the error of an image whose embedding is not finite. The tensors are views of a whole forward's result: clone
        what is to be kept.
        """
        results: list[Tensor | InvalidRequest] = []
        for pack in pack_images([num_patches(grid) for grid in grids], self._max_patches):
            pack_grids = grids[pack.start : pack.stop]
            pixel_values = self._to_device(images[pack.start : pack.stop])
            image_embeds = self._model(pixel_values, pack_grids)
            results += _finite_images(image_embeds, pack_grids)
        return results

    def _to_device(self, images: Sequence[Tensor]) -> Tensor:
        """One tensor on the device. The pinned buffer comes from torch's caching allocator, which reuses it safely."""
        if self._device.type != "cuda":
            return torch.cat(list(images)).to(self._device)
        rows = sum(map(len, images))
        pinned = torch.empty(rows, *images[0].shape[1:], dtype=torch.uint8, pin_memory=True)
        torch.cat(list(images), out=pinned)
        return pinned.to(self._device, non_blocking=True)


def _finite_images(image_embeds: Tensor, grids: Sequence[Grid]) -> list[Tensor | InvalidRequest]:
    """Split a forward's result by image. The flags cross to the host in one copy, the only wait of a forward."""
    tokens = [num_image_tokens(grid) for grid in grids]
    images = torch.split(image_embeds, tokens)
    row_is_finite = torch.split(image_embeds.isfinite().all(-1).cpu(), tokens)
    return [
        embeds
        if bool(finite.all())
        else InvalidRequest(f"the vision encoder gave values that are not finite in {int((~finite).sum())} rows")
        for embeds, finite in zip(images, row_is_finite, strict=True)
    ]
