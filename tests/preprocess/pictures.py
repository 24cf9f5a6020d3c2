# SPDX-License-Identifier: Apache-2.0
"""Files and settings that the preprocessing tests share."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from kimi_triton.preprocess.settings import ImageSettings

HALF = (0.5, 0.5, 0.5)
KIMI_VL = ImageSettings(family="kimi_vl", in_patch_limit=4096, image_mean=HALF, image_std=HALF)
KIMI_K25 = ImageSettings(
    family="kimi_k25",
    in_patch_limit=16384,
    in_patch_limit_each_frame=4096,
    temporal_merge_kernel_size=4,
    image_mean=HALF,
    image_std=HALF,
)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width, channels) if channels > 1 else (height, width)
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def encode(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_file(width: int, height: int, bits: int, colour_type: int, rows: bytes, *extra_chunks: bytes) -> bytes:
    """A PNG put together by hand; `rows` holds the samples, each row after its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    chunks = [
        png_chunk(b"IHDR", header),
        *extra_chunks,
        png_chunk(b"IDAT", zlib.compress(rows)),
        png_chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def jpeg_with_segment(jpeg: bytes, marker: bytes, payload: bytes) -> bytes:
    """`jpeg` with one more segment right after its start-of-image marker."""
    return jpeg[:2] + marker + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


def jpeg_without_segment(jpeg: bytes, marker: bytes) -> bytes:
    start = jpeg.index(marker)
    (length,) = struct.unpack(">H", jpeg[start + 2 : start + 4])
    return jpeg[:start] + jpeg[start + 2 + length :]


def jpeg_with_scans(jpeg: bytes, num_scans: int) -> bytes:
    """A progressive `jpeg` whose last scan is repeated until there are `num_scans`."""
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + jpeg[last:-2] * (num_scans - jpeg.count(b"\xff\xda")) + jpeg[-2:]
