# SPDX-License-Identifier: Apache-2.0
"""Whatever a caller holds as a picture, as the bytes that travel in the `image` input.

Files, bytes and data URLs travel as they are: the server decodes them, so it alone decides what is a valid
picture. Pixels in memory are packed as PNG, which keeps every value.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from kimi_client.errors import InvalidRequest

ImageLike: TypeAlias = str | Path | bytes | Image.Image | NDArray[np.uint8]
"""A path, a data URL, the bytes of a file, a Pillow image, or pixels: uint8 (height, width[, 1, 3 or 4])."""

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_CHANNELS = (1, 3, 4)  # grey, RGB, RGBA


def image_elements(images: Sequence[ImageLike]) -> list[bytes]:
    """Return one element of the `image` input per picture, in order; raises InvalidRequest naming the image."""
    if isinstance(images, (str, bytes, Path, Image.Image, np.ndarray)):
        raise InvalidRequest("images must be a list of pictures, even for one picture")
    return [image_element(image, index) for index, image in enumerate(images)]


def image_element(image: ImageLike, index: int = 0) -> bytes:
    """Return one picture as the bytes of an encoded file, or as a data URL where it was given as one."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, Path)):
        return _read(str(image), index)
    if isinstance(image, Image.Image):
        return _png(image)
    if isinstance(image, np.ndarray):
        return _png(_from_pixels(image, index))
    raise InvalidRequest(
        f"image {index}: expected a path, data URL, bytes, Pillow image or array, got {type(image).__name__}"
    )


def _read(text: str, index: int) -> bytes:
    if text.startswith("data:"):
        return text.encode()
    if text.startswith(("http://", "https://")):
        raise InvalidRequest(f"image {index}: web addresses are not fetched; download {text} and send the file")
    try:
        return Path(text).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest(f"image {index}: cannot read {text}: {error.strerror}") from error


def _from_pixels(pixels: NDArray[np.uint8], index: int) -> Image.Image:
    is_image = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in _CHANNELS)
    if pixels.dtype != np.uint8 or not is_image or pixels.size == 0:
        raise InvalidRequest(
            f"image {index}: expected uint8 pixels (height, width[, 1, 3 or 4]), got {pixels.dtype} {pixels.shape}"
        )
    squeezed = pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    return Image.fromarray(np.ascontiguousarray(squeezed))


def _png(image: Image.Image) -> bytes:
    # A camera's orientation tag would be lost in the PNG, so the pixels are turned here, as the server does for files.
    upright = ImageOps.exif_transpose(image)
    packed = io.BytesIO()
    (upright if upright.mode in _PNG_MODES else upright.convert("RGB")).save(packed, "PNG", compress_level=1)
    return packed.getvalue()
