# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kimi_client import InvalidRequest
from kimi_client.images import image_element, image_elements


def noise(height: int, width: int, channels: int = 3) -> np.ndarray[Any, Any]:
    shape = (height, width) if channels == 0 else (height, width, channels)
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


def decoded(element: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(element)))


def test_files_and_bytes_travel_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"\xff\xd8 not even a picture")
    assert image_elements([path, str(path), path.read_bytes()]) == [path.read_bytes()] * 3


def test_a_data_url_travels_as_it_is() -> None:
    assert image_element("data:image/png;base64,AAAA") == b"data:image/png;base64,AAAA"


@pytest.mark.parametrize("channels", [0, 3, 4])
def test_pixels_arrive_exactly(channels: int) -> None:
    pixels = noise(13, 7, channels)
    assert np.array_equal(decoded(image_element(pixels)), pixels)


def test_one_channel_is_grey() -> None:
    pixels = noise(5, 6, 1)
    assert np.array_equal(decoded(image_element(pixels)), pixels[:, :, 0])


def test_a_slice_with_strides_arrives_exactly() -> None:
    pixels = noise(20, 30)[::2, ::-1]
    assert np.array_equal(decoded(image_element(pixels)), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_pillow_images_keep_their_mode_and_values(mode: str) -> None:
    image = Image.fromarray(noise(9, 8)).convert(mode)
    arrived = Image.open(io.BytesIO(image_element(image)))
    assert np.array_equal(np.asarray(arrived.convert("RGBA")), np.asarray(image.convert("RGBA")))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV"])
def test_pillow_modes_that_png_lacks_become_rgb(mode: str) -> None:
    image = Image.fromarray(noise(9, 8)).convert(mode)
    assert np.array_equal(decoded(image_element(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a1_a_pillow_image_is_turned_upright(orientation: int) -> None:
    corners = np.zeros((48, 64, 3), np.uint8)
    corners[:8, :8], corners[:8, -8:], corners[-8:, :8] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    exif = Image.Exif()
    exif[0x0112] = orientation
    packed = io.BytesIO()
    Image.fromarray(corners).save(packed, "PNG", exif=exif)
    turned = decoded(image_element(Image.open(packed)))
    assert turned.shape[:2] == ((48, 64) if orientation <= 4 else (64, 48))
    # The EXIF standard's own table: where the stored top-left corner belongs for each orientation.
    top, left = {1: (1, 1), 2: (1, 0), 3: (0, 0), 4: (0, 1), 5: (1, 1), 6: (1, 0), 7: (0, 0), 8: (0, 1)}[orientation]
    assert tuple(turned[0 if top else -1, 0 if left else -1]) == (255, 0, 0)


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
    ],
)
def test_arrays_that_are_no_picture_are_refused_by_index(pixels: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"image 1: expected uint8 pixels .* got (uint8|float32)"):
        image_elements([b"x", pixels])


def test_a_missing_file_is_named_with_its_index(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"image 2: cannot read .*nowhere\.png: No such file"):
        image_elements([b"x", b"y", tmp_path / "nowhere.png"])


def test_web_addresses_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="image 0: web addresses are not fetched"):
        image_elements(["https://example.org/cat.png"])


def test_other_types_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"image 0: expected a path, .* got int"):
        image_elements([3])  # type: ignore[list-item]


@pytest.mark.parametrize("lonely", [b"bytes", "path.png", Image.new("L", (1, 1)), np.zeros((2, 2), np.uint8)])
def test_a_picture_that_is_not_in_a_list_is_refused(lonely: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a list"):
        image_elements(lonely)
