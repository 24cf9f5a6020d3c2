# SPDX-License-Identifier: Apache-2.0
"""Pixels, order and digest of patches."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.images import decode_image
from kimi_triton.preprocess.patches import frames_to_patches, image_to_patches, num_image_tokens
from kimi_triton.preprocess.settings import ImageSettings
from tests.preprocess.pictures import KIMI_K25, KIMI_VL, encode, noise

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def cut_slowly(canvas: Pixels) -> Pixels:
    """(H, W, 3) -> (num_patches, 3, 14, 14), one patch after the other."""
    height, width, _ = canvas.shape
    return np.stack(
        [
            canvas[top : top + 14, left : left + 14].transpose(2, 0, 1)
            for top in range(0, height, 14)
            for left in range(0, width, 14)
        ]
    )


def on_black(image: Image.Image, grid: tuple[int, int]) -> Pixels:
    canvas = np.zeros((grid[0] * 14, grid[1] * 14, 3), np.uint8)
    canvas[: image.height, : image.width] = np.asarray(image)
    return canvas


@pytest.mark.parametrize(
    ("size", "settings", "resized", "grid"),
    [
        ((1, 1), KIMI_VL, (1, 1), (2, 2)),
        ((29, 27), KIMI_VL, (29, 27), (2, 4)),
        ((56, 84), KIMI_K25, (56, 84), (6, 4)),
        ((640, 480), KIMI_K25, (640, 480), (36, 46)),
        ((1920, 1080), KIMI_VL, (1196, 672), (48, 86)),
        ((1920, 1080), KIMI_K25, (1920, 1080), (78, 138)),
        ((8000, 100), KIMI_K25, (7168, 89), (8, 512)),
        ((4, 10000), KIMI_K25, (2, 7168), (512, 2)),
    ],
)
def test_pixels_are_those_of_pillow_bicubic_on_black(
    size: tuple[int, int], settings: ImageSettings, resized: tuple[int, int], grid: tuple[int, int]
) -> None:
    image = noise(*size)
    patches = image_to_patches(image, 0, settings)
    assert patches.grid == (1, *grid)
    assert patches.pixel_values.dtype == np.uint8
    assert patches.pixel_values.flags.c_contiguous
    expected = cut_slowly(on_black(image.resize(resized, Image.Resampling.BICUBIC), grid))
    assert np.array_equal(patches.pixel_values, expected)


def checkerboard(side: int) -> Image.Image:
    return Image.fromarray((np.indices((side, side)).sum(0) % 2 * 255).astype(np.uint8)).convert("RGB")


def photo(width: int, height: int) -> Image.Image:
    return noise(width // 16, height // 16).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    ("image", "resized", "grid"),
    [
        (noise(1024, 1024), (897, 897), (66, 66)),
        (checkerboard(1024), (897, 897), (66, 66)),
        (photo(2048, 1536), (1039, 779), (56, 76)),
        (photo(4000, 3000), (1036, 777), (56, 74)),
    ],
    ids=["noise", "checkerboard", "photo", "large_photo"],
)
def test_b3_resizing_is_that_of_the_reference(
    image: Image.Image, resized: tuple[int, int], grid: tuple[int, int]
) -> None:
    patches = image_to_patches(image, 0, KIMI_VL)
    assert patches.grid == (1, *grid)
    reference = on_black(image.resize(resized, Image.Resampling.BICUBIC), grid)
    assert np.array_equal(patches.pixel_values, cut_slowly(reference))


def test_pad_colour_is_minus_one_after_normalising() -> None:
    patches = image_to_patches(Image.new("RGB", (13, 13), "white"), 0, KIMI_K25)
    normalised = (patches.pixel_values / 255 - 0.5) / 0.5
    assert patches.grid == (1, 2, 2)
    assert (normalised[0, :, :13, :13] == 1).all()
    assert (normalised[0, :, 13:] == -1).all()
    assert (normalised[0, :, :, 13:] == -1).all()
    assert (normalised[1:] == -1).all()


def test_patches_are_in_raster_order_so_that_the_merger_finds_its_cells() -> None:
    grid_height, grid_width = 4, 6
    numbers = np.arange(grid_height * grid_width, dtype=np.uint8).reshape(grid_height, grid_width)
    picture = Image.fromarray(numbers.repeat(14, 0).repeat(14, 1)).convert("RGB")
    patches = image_to_patches(picture, 0, KIMI_VL).pixel_values
    assert (patches == np.arange(24).reshape(-1, 1, 1, 1)).all()
    merged = patches[:, 0, 0, 0].reshape(2, 2, 3, 2).transpose(0, 2, 1, 3).reshape(-1, 4)
    assert merged[0].tolist() == [0, 1, grid_width, grid_width + 1]
    assert merged[1].tolist() == [2, 3, grid_width + 2, grid_width + 3]


def test_channels_are_red_green_blue() -> None:
    patches = image_to_patches(Image.new("RGB", (28, 28), (1, 2, 3)), 0, KIMI_VL).pixel_values
    assert [np.unique(patches[:, channel]).tolist() for channel in range(3)] == [[1], [2], [3]]


def test_without_padding_the_middle_of_the_picture_is_cut() -> None:
    image = noise(61, 90)
    patches = image_to_patches(image, 0, replace(KIMI_VL, pad_input=False))
    assert patches.grid == (1, 6, 4)
    assert np.array_equal(patches.pixel_values, cut_slowly(np.asarray(image)[3:87, 2:58]))


@pytest.mark.parametrize("size", [(1, 1), (57, 33), (225, 700), (1366, 224)])
@pytest.mark.parametrize("settings", [KIMI_VL, KIMI_K25], ids=lambda settings: settings.family)
def test_b4_rows_grid_and_tokens_agree(size: tuple[int, int], settings: ImageSettings) -> None:
    patches = image_to_patches(Image.new("RGB", size), 0, settings)
    assert len(patches.pixel_values) == np.prod(patches.grid) == 4 * num_image_tokens(patches.grid)


def test_b1_extreme_shapes_are_served_or_refused_by_name() -> None:
    for size in ((1, 1), (5, 5), (1, 2000), (2000, 1), (5, 1093), (1093, 5), (1, 4096), (400, 800)):
        for settings in (KIMI_VL, KIMI_K25):
            assert 0 not in image_to_patches(Image.new("RGB", size), 0, settings).grid
    with pytest.raises(InvalidRequest, match=r"^image 7: 4x10000 .*512"):
        image_to_patches(Image.new("RGB", (4, 10000)), 7, KIMI_VL)


def test_tokens_do_not_depend_on_the_number_of_frames() -> None:
    assert num_image_tokens((1, 4, 6)) == num_image_tokens((4, 4, 6)) == 6


def test_frames_of_a_chunk_follow_each_other() -> None:
    frames = [noise(57, 33, seed=seed) for seed in range(3)]
    chunk = frames_to_patches(frames, 0, KIMI_K25)
    assert chunk.grid == (3, 4, 6)
    apart = [image_to_patches(frame, 0, KIMI_K25).pixel_values for frame in frames]
    assert np.array_equal(chunk.pixel_values, np.concatenate(apart))


def test_frames_take_the_size_of_the_first() -> None:
    first, second = noise(56, 28), noise(100, 90)
    chunk = frames_to_patches([first, second], 0, KIMI_K25)
    assert chunk.grid == (2, 2, 4)
    resized = np.asarray(second.resize((56, 28), Image.Resampling.BICUBIC))
    assert np.array_equal(chunk.pixel_values[8:], cut_slowly(resized))


def test_frames_obey_the_limit_of_frames() -> None:
    frames = [noise(1280, 720)] * 2
    assert frames_to_patches(frames, 0, KIMI_K25).grid == (2, 50, 86)


@pytest.mark.parametrize(("settings", "num_frames"), [(KIMI_K25, 0), (KIMI_K25, 5), (KIMI_VL, 2)])
def test_chunks_of_a_wrong_length_are_refused(settings: ImageSettings, num_frames: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"^image 1: a chunk of {num_frames} frames"):
        frames_to_patches([noise(28, 28)] * num_frames, 1, settings)


def test_f1_equal_bytes_in_another_grid_have_another_digest() -> None:
    wide, tall = Image.new("RGB", (112, 28)), Image.new("RGB", (28, 112))
    first, second = image_to_patches(wide, 0, KIMI_K25), image_to_patches(tall, 0, KIMI_K25)
    assert first.pixel_values.tobytes() == second.pixel_values.tobytes()
    assert first.digest != second.digest
    two_frames = frames_to_patches([Image.new("RGB", (56, 28))] * 2, 0, KIMI_K25)
    assert two_frames.pixel_values.tobytes() == first.pixel_values.tobytes()
    assert two_frames.digest != first.digest


def test_f1_one_changed_pixel_changes_the_digest() -> None:
    image = noise(280, 280)
    before = image_to_patches(image, 0, KIMI_K25).digest
    assert len(before) == 32
    image.putpixel((279, 279), tuple(255 - value for value in image.getpixel((279, 279))))
    assert image_to_patches(image, 0, KIMI_K25).digest != before


def test_f1_the_digest_covers_every_row_of_patches() -> None:
    image = noise(140, 14 * 12)
    digests = {image_to_patches(image, 0, KIMI_K25).digest}
    for row in range(12):
        changed = image.copy()
        changed.putpixel((3, row * 14), tuple(255 - value for value in image.getpixel((3, row * 14))))
        digests.add(image_to_patches(changed, 0, KIMI_K25).digest)
    assert len(digests) == 13


@pytest.mark.parametrize(("size", "settings"), [((57, 33), KIMI_K25), ((1500, 1100), KIMI_VL)])
def test_an_array_makes_the_patches_of_the_same_picture(size: tuple[int, int], settings: ImageSettings) -> None:
    image = noise(*size)
    from_array, from_image = (image_to_patches(given, 3, settings) for given in (np.asarray(image), image))
    assert np.array_equal(from_array.pixel_values, from_image.pixel_values)
    assert (from_array.grid, from_array.digest) == (from_image.grid, from_image.digest)


DIGEST_IN_A_FRESH_PROCESS = """
import sys
from kimi_triton.preprocess.patches import image_to_patches
from kimi_triton.preprocess import images, payload, video
from tests.preprocess.pictures import KIMI_K25, noise
print(image_to_patches(noise(57, 33), 0, KIMI_K25).digest.hex(), "torch" in sys.modules)
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_f1_digest_is_the_same_in_every_process_and_needs_no_torch(hash_seed: str) -> None:
    here = image_to_patches(noise(57, 33), 0, KIMI_K25).digest.hex()
    command = [sys.executable, "-c", DIGEST_IN_A_FRESH_PROCESS]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": hash_seed})
    assert answer.stdout.split() == [here, "False"]


def test_f3_settings_and_family_are_in_the_digest() -> None:
    image = noise(640, 480)
    settings = [KIMI_VL, replace(KIMI_VL, in_patch_limit=1024), KIMI_K25]
    assert len({image_to_patches(image, 0, each).digest for each in settings}) == 3


def test_f3_equal_pixels_of_different_files_share_a_digest() -> None:
    palette = noise(28, 28).quantize(16)
    files = [encode(palette, "PNG"), encode(palette.convert("RGB"), "PNG"), encode(palette.convert("RGB"), "BMP")]
    digests = {image_to_patches(decode_image(data, 0, KIMI_K25), 0, KIMI_K25).digest for data in files}
    assert len(digests) == 1
