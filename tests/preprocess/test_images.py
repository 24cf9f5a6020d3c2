# SPDX-License-Identifier: Apache-2.0
"""Decoding: upright, opaque, eight bits, RGB; or refused by the number of the image."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile

from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.images import decode_image
from kimi_triton.preprocess.settings import MAX_JPEG_SCANS
from kimi_triton.preprocess.sizes import place_image
from tests.preprocess.pictures import (
    KIMI_K25,
    KIMI_VL,
    encode,
    jpeg_with_scans,
    jpeg_with_segment,
    jpeg_without_segment,
    noise,
    png_chunk,
    png_file,
)

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
APP1, APP14 = b"\xff\xe1", b"\xff\xee"


def decoded(data: bytes, index: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    image = decode_image(data, index, KIMI_K25)
    assert isinstance(image, np.ndarray) or image.mode == "RGB"
    return np.asarray(image)


def refused(data: bytes, index: int = 1) -> str:
    with pytest.raises(InvalidRequest, match=f"^image {index}: ") as caught:
        decode_image(data, index, KIMI_K25)
    return str(caught.value)


def corners(width: int, height: int) -> Image.Image:
    """Four coloured quarters, so that each of the eight orientations looks different."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    image.paste(WHITE, (width // 2, height // 2, width, height))
    return image


# How a camera that writes this orientation has stored the upright picture.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def stored_as(upright: Image.Image, orientation: int) -> tuple[Image.Image, Image.Exif]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turn = STORED[orientation]
    return (upright if turn is None else upright.transpose(turn)), exif


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize(
    ("file_format", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"})],
)
def test_a1_lossless_files_come_out_upright(file_format: str, options: dict[str, Any], orientation: int) -> None:
    upright = noise(48, 32)
    stored, exif = stored_as(upright, orientation)
    data = encode(stored, file_format, exif=exif, **options)
    assert np.array_equal(decoded(data), np.asarray(upright))


@pytest.mark.parametrize("orientation", STORED)
def test_a1_photos_come_out_upright_and_their_grid_follows(orientation: int) -> None:
    upright = corners(480, 640)
    stored, exif = stored_as(upright, orientation)
    pixels = decoded(encode(stored, "JPEG", quality=95, exif=exif))
    height, width, _ = pixels.shape
    assert place_image(width, height, 0, KIMI_K25).grid == (46, 36)
    assert np.abs(pixels - np.asarray(upright, np.int16)).mean() < 1


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (16, 16), (33, 17), (640, 480)])
@pytest.mark.parametrize(
    "options",
    [
        *({"subsampling": name, "quality": 60} for name in ("4:4:4", "4:2:2", "4:2:0")),
        {"quality": 100},
        {"quality": 1},
        {"progressive": True},
        {"progressive": True, "subsampling": "4:2:0", "quality": 30},
        {"optimize": True},
        {"restart_marker_rows": 1},
        {"keep_rgb": True},
    ],
    ids=str,
)
def test_a_sound_jpeg_has_the_pixels_that_pillow_decodes(options: dict[str, Any], size: tuple[int, int]) -> None:
    data = encode(noise(*size), "JPEG", **options)
    pixels = decode_image(data, 0, KIMI_K25)
    assert isinstance(pixels, np.ndarray)
    assert np.array_equal(pixels, np.asarray(Image.open(BytesIO(data))))


def test_what_pillow_forgives_a_damaged_jpeg_is_forgiven() -> None:
    whole = encode(noise(64, 64), "JPEG")
    start = whole.rindex(b"\xff\xda")
    data = whole[:start] + b"some stray bytes" + whole[start:]  # libjpeg warns of them
    assert np.array_equal(decoded(data), decoded(whole))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_a1_unknown_orientations_mean_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = noise(8, 6)
    assert np.array_equal(decoded(encode(image, "PNG", exif=exif)), np.asarray(image))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("tiff_header", [b"", b"MM\x00*\x00\x00\x00\x08", b"II*\x00\x08\x00\x00\x00"])
def test_a2_jpeg_with_broken_exif_is_served(tiff_header: bytes, seed: int) -> None:
    junk = np.random.default_rng(seed).bytes(100)
    plain = encode(noise(64, 64), "JPEG")
    for jpeg in (plain, jpeg_without_segment(plain, b"\xff\xe0")):
        data = jpeg_with_segment(jpeg, APP1, b"Exif\x00\x00" + tiff_header + junk)
        assert np.array_equal(decoded(data), decoded(plain))


def test_a2_png_with_an_exploding_text_chunk_is_refused() -> None:
    chunk = png_chunk(b"zTXt", b"comment\x00\x00" + zlib.compress(bytes(3_000_000)))
    refused(png_file(1, 1, 8, 2, b"\x00\x01\x02\x03", chunk))


def test_a3_cmyk_jpeg_keeps_its_colours_with_and_without_the_adobe_marker() -> None:
    patches = Image.new("CMYK", (64 * 5, 64))
    inks = {(255, 0, 0, 0): (0, 255, 255), (0, 255, 0, 0): (255, 0, 255), (0, 0, 255, 0): (255, 255, 0)}
    inks |= {(0, 0, 0, 255): BLACK, (0, 0, 0, 0): WHITE}
    for column, ink in enumerate(inks):
        patches.paste(ink, (column * 64, 0, column * 64 + 64, 64))
    data = encode(patches, "JPEG", quality=95)
    for jpeg in (data, jpeg_without_segment(data, APP14)):
        centres = decoded(jpeg)[32, 32::64]
        assert np.abs(centres.astype(int) - np.array(list(inks.values()))).max() <= 8


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_a4_colours_under_full_transparency_do_not_matter(mode: str, file_format: str) -> None:
    image = noise(56, 56, mode)
    image.putalpha(0)
    assert (decoded(encode(image, file_format)) == 255).all()


def test_a4_half_transparent_red_is_pink() -> None:
    assert np.array_equal(decoded(encode(Image.new("RGBA", (4, 4), (255, 0, 0, 128)), "PNG"))[0, 0], (255, 127, 127))


def test_a4_opaque_alpha_changes_nothing() -> None:
    image = noise(16, 16)
    opaque = image.copy()
    opaque.putalpha(255)
    assert np.array_equal(decoded(encode(opaque, "PNG")), np.asarray(image))


def test_a4_lossless_webp_hides_what_is_transparent() -> None:
    image = noise(32, 32, "RGBA")
    image.putalpha(0)
    assert (decoded(encode(image, "WEBP", lossless=True, exact=True)) == 255).all()


TRANSPARENT_PNGS = {
    "palette": (8, 3, b"\x00\x01", [png_chunk(b"PLTE", bytes([9, 9, 9, 4, 5, 6])), png_chunk(b"tRNS", b"\x00")]),
    "grey": (8, 0, b"\x07\x80", [png_chunk(b"tRNS", struct.pack(">H", 7))]),
    "grey16": (16, 0, struct.pack(">2H", 0x1234, 0x8000), [png_chunk(b"tRNS", struct.pack(">H", 0x1234))]),
    "rgb": (8, 2, bytes([1, 2, 3, 4, 5, 6]), [png_chunk(b"tRNS", struct.pack(">3H", 1, 2, 3))]),
    "rgba16": (16, 6, struct.pack(">8H", 9, 9, 9, 0, 0x8000, 0x8000, 0x8000, 0xFFFF), []),
}


@pytest.mark.parametrize("kind", TRANSPARENT_PNGS)
def test_a4_colours_declared_transparent_become_white(kind: str) -> None:
    bits, colour_type, samples, chunks = TRANSPARENT_PNGS[kind]
    first, second = decoded(png_file(2, 1, bits, colour_type, b"\x00" + samples, *chunks))[0]
    assert tuple(first) == WHITE
    assert tuple(second) != WHITE


@pytest.mark.parametrize("file_format", FORMATS)
def test_a5_files_cut_in_half_are_refused(file_format: str) -> None:
    data = encode(noise(64, 64), file_format)
    assert file_format in refused(data[: len(data) // 2])


def test_a5_truncated_jpeg_names_its_image() -> None:
    data = encode(noise(64, 64), "JPEG")
    assert refused(data[:-128], index=1).startswith("image 1: JPEG file cannot be decoded: image file is truncated")
    assert decoded(data).shape == (64, 64, 3)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("data", [b"", b"\xff", bytes(4096), b"just some text"], ids=["empty", "byte", "zeros", "text"])
def test_a5_what_is_no_picture_is_refused(data: bytes) -> None:
    assert "not a JPEG, PNG" in refused(data)


@pytest.mark.parametrize(
    "magic", [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x04\x00\x00\x00WEBP", b"GIF89a", b"BM", b"II*\x00"]
)
def test_a5_a_magic_number_alone_is_refused(magic: bytes) -> None:
    assert "header cannot be read" in refused(magic)


def huge_headers(side: int) -> dict[str, bytes]:
    """Files that end where their pixels would begin."""
    png = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    jpeg = encode(Image.new("RGB", (8, 8)), "JPEG")
    size_at = jpeg.index(b"\xff\xc0") + 5
    bmp = encode(Image.new("RGB", (8, 8)), "BMP")
    tiff = encode(Image.new("L", (8, 8)), "TIFF")
    entries = [struct.pack("<HHI", tag, 4, 1) for tag in (256, 257)]
    for entry in entries:
        start = tiff.index(entry) + len(entry)
        tiff = tiff[:start] + struct.pack("<I", side) + tiff[start + 4 :]
    webp_side = (side - 1).to_bytes(3, "little")
    return {
        "PNG": png + png_chunk(b"IDAT", b""),
        "JPEG": jpeg[:size_at] + struct.pack(">HH", side, side) + jpeg[size_at + 4 :],
        "GIF": b"GIF89a" + struct.pack("<HH", side, side) + b"\x00\x00\x00,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x08",
        "BMP": bmp[:18] + struct.pack("<ii", side, side) + bmp[26:],
        "TIFF": tiff,
        "WEBP": b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + webp_side * 2,
    }


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("side", [10_001, 12_000, 20_000])
def test_a6_size_is_judged_from_the_header(file_format: str, side: int) -> None:
    started = time.process_time()
    message = refused(huge_headers(side)[file_format])
    assert time.process_time() - started < 0.1
    if file_format != "WEBP":  # whose reader looks for pixels before it tells the size
        assert f"{side}x{side} is {side * side} pixels, at most 100000000" in message


def test_a6_a_real_bomb_is_refused_without_inflating_it() -> None:
    row = bytes(1 + 20_000 // 8)
    data = png_file(20_000, 20_000, 1, 0, row * 20_000)
    assert len(data) < 200_000
    started = time.process_time()
    assert "20000x20000" in refused(data)
    assert time.process_time() - started < 0.1


def test_a6_the_cap_is_inclusive_and_adjustable() -> None:
    data = encode(noise(20, 10), "PNG")
    assert decode_image(data, 0, replace(KIMI_K25, max_pixels=200)).size == (20, 10)
    with pytest.raises(InvalidRequest, match="20x10 is 200 pixels, at most 199"):
        decode_image(data, 0, replace(KIMI_K25, max_pixels=199))


def test_a6_pictures_between_the_warning_limit_of_pillow_and_our_cap_are_served() -> None:
    """95 million pixels, above the 89 million at which Pillow warns (here: raises, warnings being errors)."""
    data = png_file(95_000, 1_000, 1, 0, bytes(1 + 95_000 // 8) * 1_000)
    assert decode_image(data, 0, KIMI_K25).size == (95_000, 1_000)


def test_a6_a_small_jpeg_of_endless_scans_is_refused_without_decoding_it() -> None:
    photo = encode(noise(16, 16).resize((2000, 2000)), "JPEG", quality=30, progressive=True)
    data = jpeg_with_scans(photo, 2000)
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=r"^image 4: .*more than 100 scans"):
        decode_image(data, 4, KIMI_K25)
    assert time.process_time() - start < 0.5


def test_a6_the_limit_of_scans_is_inclusive() -> None:
    photo = encode(noise(32, 32), "JPEG", progressive=True)
    assert decoded(jpeg_with_scans(photo, MAX_JPEG_SCANS)).shape == (32, 32, 3)
    with pytest.raises(InvalidRequest, match="scans"):
        decoded(jpeg_with_scans(photo, MAX_JPEG_SCANS + 1))


def test_a6_only_scans_of_the_picture_itself_count() -> None:
    photo = encode(noise(32, 32), "JPEG")
    inside = jpeg_with_segment(photo, b"\xff\xe5", b"\xff\xda" * 500)
    behind = photo + b"\xff\xda\x00\x02" * 500
    for data in (inside, behind):
        assert np.array_equal(decoded(data), decoded(photo))


@pytest.mark.parametrize("orientation", [1, 6])
def test_b2_a_side_too_long_for_kimi_vl_is_refused_from_the_header(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(noise(7168, 28), "JPEG", exif=exif)
    seen = "7168x28" if orientation == 1 else "28x7168"
    with pytest.raises(InvalidRequest, match=rf"^image 2: {seen} .*512"):
        decode_image(data[:2000], 2, KIMI_VL)  # nothing but its header
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        decode_image(data[:2000], 2, KIMI_K25)


def test_a8_colour_profiles_are_not_applied() -> None:
    image = noise(32, 32)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    grey = srgb[:16] + b"GRAY" + srgb[20:]  # claims another colour space than the picture has
    for file_format in ("PNG", "JPEG", "WEBP", "TIFF"):
        plain = decoded(encode(image, file_format))
        for profile in (srgb, grey, np.random.default_rng(0).bytes(500)):
            assert np.array_equal(decoded(encode(image, file_format, icc_profile=profile)), plain)


def test_a8_32_threads_decode_what_one_thread_decodes() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encode(noise(64, 48, seed=seed), file_format) for seed, file_format in enumerate(FORMATS)]
    files += [encode(noise(64, 48), "JPEG", exif=exif, progressive=True), encode(noise(64, 48, "RGBA"), "PNG")]

    def fingerprint(data: bytes) -> bytes:
        return hashlib.sha256(decode_image(data, 0, KIMI_K25).tobytes()).digest()

    serial = [fingerprint(data) for data in files]
    with ThreadPoolExecutor(32) as threads:
        parallel = list(threads.map(fingerprint, files * 400))
    assert parallel == serial * 400


# Prints blocks that were kept, made anew and changed in size while a large and a small picture took turns.
DECODE_MEMORY = """
from PIL import Image
from kimi_triton.preprocess.images import decode_image, keep_decode_memory
from tests.preprocess.pictures import KIMI_K25, encode, noise
keep_decode_memory()
files = [encode(noise(*size), "BMP") for size in ((2000, 1500), (640, 480), (1999, 1500))]
def decode_all():
    for data in files:
        decode_image(data, 0, KIMI_K25).resize((700, 500))
decode_all()
Image.core.reset_stats()
decode_all()
stats = Image.core.get_stats()
print(Image.core.get_blocks_max(), stats["allocated_blocks"], stats["reused_blocks"], stats["reallocated_blocks"])
"""


@pytest.mark.parametrize(("environment", "kept"), [({}, 512), ({"PILLOW_BLOCKS_MAX": "3"}, 3)])
def test_decode_memory_is_kept_unless_the_environment_decides(environment: dict[str, str], kept: int) -> None:
    command = [sys.executable, "-c", DECODE_MEMORY]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=60)
    blocks_max, allocated, reused, reallocated = map(int, done.stdout.split())
    assert blocks_max == kept
    if kept == 512:
        assert allocated == 0
        assert reused > 150
        assert reallocated < reused / 5


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB", "RGBX"])
def test_every_colour_mode_becomes_rgb(mode: str) -> None:
    orange = Image.new("RGB", (16, 16), (250, 120, 20))
    if mode == "LAB":
        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        image = ImageCms.profileToProfile(orange, *profiles, outputMode="LAB")
        assert image is not None
    elif mode == "P":
        image = orange.quantize(4)
    else:
        image = orange.convert(mode)
    expected = {"1": WHITE, "L": (147, 147, 147)}.get(mode, (250, 120, 20))
    assert np.abs(decoded(encode(image, "TIFF"))[8, 8].astype(int) - expected).max() <= 3


@pytest.mark.parametrize("data_type", ["<u2", ">u2"])
def test_sixteen_bit_grey_is_scaled_not_clipped(data_type: str) -> None:
    values = np.arange(0, 65536, 16, dtype=data_type).reshape(64, 64)
    for file_format in ("PNG", "TIFF"):
        grey = decoded(encode(Image.fromarray(values), file_format))[..., 0]
        assert np.array_equal(grey, values // 256)


def test_sixteen_bit_colour_and_grey_are_scaled_alike() -> None:
    samples = [0x0000, 0x12FF, 0x80FF, 0xFFFF]
    grey = decoded(png_file(4, 1, 16, 0, b"\x00" + struct.pack(">4H", *samples)))
    colour = decoded(png_file(4, 1, 16, 2, b"\x00" + b"".join(struct.pack(">H", s) * 3 for s in samples)))
    assert np.array_equal(grey, colour)
    assert grey[0, :, 0].tolist() == [0x00, 0x12, 0x80, 0xFF]


def test_32_bit_integers_are_read_as_16_bits_when_they_fit() -> None:
    grey = decoded(encode(Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], np.int32)), "TIFF"))
    assert grey[0, :, 0].tolist() == [0x00, 0x80, 0xFF]
    assert "beyond 16 bits" in refused(encode(Image.fromarray(np.array([[0, 0x10000]], np.int32)), "TIFF"))
    assert "beyond 16 bits" in refused(encode(Image.fromarray(np.array([[0, -1]], np.int32)), "TIFF"))


def test_floating_point_samples_are_refused() -> None:
    assert "floating-point" in refused(encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))


@pytest.mark.parametrize(
    ("file_format", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]
)
def test_the_first_frame_of_many_is_the_picture(file_format: str, options: dict[str, Any]) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in (RED, GREEN, BLUE)]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert (decoded(data) == RED).all()


@given(
    file_format=st.sampled_from(FORMATS),
    damage=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=5),
)
def test_damaged_files_are_decoded_or_refused(file_format: str, damage: list[tuple[int, int]]) -> None:
    data = bytearray(encode(noise(24, 16), file_format))
    for position, value in damage:
        data[position % len(data)] = value
    try:
        decoded(bytes(data))
    except InvalidRequest:
        refused(bytes(data), index=2)
