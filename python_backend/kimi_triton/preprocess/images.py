# SPDX-License-Identifier: Apache-2.0
"""From an encoded file to an upright RGB picture of 8 bits a channel.

- Format and size are decided from the header; nothing is decoded before the size and the scans of a JPEG are accepted.
- EXIF orientation is applied. Metadata that cannot be read is as good as none.
- Transparency is composited over white, so colours hidden under it never matter.
- Of more than 8 bits a channel the upper 8 are kept; floating-point samples are refused.
- CMYK is converted without a profile; JPEG's is taken as inverted, as Adobe writes it and browsers read it.
- The first frame of an animation or of a file of pages is the picture. Colour profiles are not honoured.
- A damaged or truncated file is refused, never filled up.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ExifTags import Base
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.jpeg_scans import has_more_scans_than
from kimi_triton.preprocess.payload import ACCEPTED, sniff_format
from kimi_triton.preprocess.settings import MAX_JPEG_SCANS, ImageSettings
from kimi_triton.preprocess.sizes import Placement, place_image

Picture = Image.Image | npt.NDArray[np.uint8]  # mode RGB, or (height, width, 3)


class QuietJpegImageFile(JpegImageFile):
    """JPEG without a look into EXIF for the resolution, which warns when that metadata is damaged."""

    def _read_dpi_from_exif(self) -> None:
        return


# Called directly rather than through Image.open, which would try every plugin Pillow has and warn or raise at its own
# process-wide pixel limit before ours is looked at.
READERS: dict[str, Callable[[BytesIO], ImageFile.ImageFile]] = {
    "JPEG": QuietJpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
WHITE = 255
BLOCK_BYTES = 256 << 10  # small beside a picture, so that nearly all blocks of pictures of any size are alike
KEPT_BLOCKS = 512

# What turns a picture upright, by the value of its EXIF orientation.
UPRIGHT: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

SWAPS_SIDES = [UPRIGHT[orientation] for orientation in (5, 6, 7, 8)]


def keep_decode_memory() -> None:
    """Let Pillow keep 128 MiB of freed picture memory for the next pictures, in this whole process.

    Having the system hand it out anew takes a third of all the time a 1920x1080 JPEG needs that Pillow decodes, and so
    does giving a kept block another size. A process that decodes many pictures calls this once; a number set by the
    environment variable PILLOW_BLOCKS_MAX is left alone.
    """
    allocator = Image.core  # type: ignore[attr-defined]  # documented by Pillow, but not exported to type checkers
    if allocator.get_blocks_max() == 0:
        allocator.set_block_size(BLOCK_BYTES)
        allocator.set_blocks_max(KEPT_BLOCKS)


def decode_image(data: bytes, index: int, settings: ImageSettings) -> Picture:
    """Decode the file `data`, image number `index` of its request, to RGB; an array when it will not be resized.

    Raises InvalidRequest for anything that is no complete file of an accepted format, for more than
    settings.max_pixels pixels, for more than MAX_JPEG_SCANS scans and for a size that the family refuses.
    """
    name = sniff_format(data)
    if name is None:
        raise InvalidRequest(f"image {index}: not a {ACCEPTED} file")
    try:
        image = READERS[name](BytesIO(data))
    except Exception as exc:
        raise InvalidRequest(f"image {index}: {name} header cannot be read: {_reason(exc)}") from exc
    placement = _check_size(image, index, settings)
    if name == "JPEG":
        if has_more_scans_than(MAX_JPEG_SCANS, data):
            raise InvalidRequest(f"image {index}: its JPEG file has more than {MAX_JPEG_SCANS} scans")
        is_final = image.size == (placement.width, placement.height) and _upright(image) is None
        if is_final and image.mode == "RGB" and (pixels := _sound_jpeg(data)) is not None:
            return pixels
    try:
        image.load()
        rgb = _to_rgb(image)
    except Exception as exc:
        raise InvalidRequest(f"image {index}: {name} file cannot be decoded: {_reason(exc)}") from exc
    turn = _upright(image)
    return rgb if turn is None else rgb.transpose(turn)


def _sound_jpeg(data: bytes) -> npt.NDArray[np.uint8] | None:
    """The same pixels as from Pillow in about half its time; None when there is anything to complain of."""
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data)
    except ValueError:
        return None  # Pillow forgives more, and says better what is wrong
    return pixels


def _check_size(image: Image.Image, index: int, settings: ImageSettings) -> Placement:
    """By the header alone."""
    width, height = image.size
    if width * height > settings.max_pixels:
        raise InvalidRequest(
            f"image {index}: {width}x{height} is {width * height} pixels, at most {settings.max_pixels} are accepted"
        )
    # Metadata behind the pixels is not waited for: what a family refuses does not depend on which side is which.
    if "exif" in image.info and _upright(image) in SWAPS_SIDES:
        width, height = height, width
    return place_image(width, height, index, settings)


def _upright(image: Image.Image) -> Image.Transpose | None:
    try:  # metadata comes from everywhere and its reader raises whatever it likes
        return UPRIGHT.get(image.getexif().get(Base.Orientation))
    except Exception:
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point samples have no agreed range")
    if image.mode.startswith("I"):
        image = _upper_eight_bits(image)
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        canvas = Image.new("RGB", image.size, (WHITE, WHITE, WHITE))
        canvas.paste(rgba, mask=rgba)
        return canvas
    return image if image.mode == "RGB" else image.convert("RGB")


def _upper_eight_bits(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits to grey of 8; a value declared transparent becomes white."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError(f"its samples run from {values.min()} to {values.max()}, beyond 16 bits")
    bits = min(image.tag_v2[BITSPERSAMPLE][0], 16) if isinstance(image, TiffImageFile) else 16
    grey = (values >> (bits - 8)).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = WHITE
    return Image.fromarray(grey)


def _reason(exc: Exception) -> str:
    return f"{exc or type(exc).__name__}"[:120]
