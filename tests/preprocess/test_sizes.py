# SPDX-License-Identifier: Apache-2.0
"""Target sizes and grids against the tables of both families."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.patches import num_image_tokens
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.preprocess.sizes import place_frames, place_image
from tests.preprocess.pictures import KIMI_K25, KIMI_VL

REFUSED = None
VL_2506 = replace(KIMI_VL, in_patch_limit=16384)
CUTTING = replace(KIMI_VL, pad_input=False)

# (width, height): grid of Kimi-VL, grid of K2.5, each (h, w) with its number of tokens.
REFERENCE = {
    (1, 1): ((2, 2, 1), (2, 2, 1)),
    (5, 5): ((2, 2, 1), (2, 2, 1)),
    (29, 27): ((2, 4, 2), (2, 4, 2)),
    (100, 100): ((8, 8, 16), (8, 8, 16)),
    (224, 224): ((16, 16, 64), (16, 16, 64)),
    (640, 480): ((36, 46, 414), (36, 46, 414)),
    (400, 800): ((58, 30, 435), (58, 30, 435)),
    (700, 840): ((60, 50, 750), (60, 50, 750)),
    (1, 2000): ((144, 2, 72), (144, 2, 72)),
    (1093, 5): ((2, 80, 40), (2, 80, 40)),
    (1, 4096): ((294, 2, 147), (294, 2, 147)),
    (1920, 1080): ((48, 86, 1032), (78, 138, 2691)),
    (2048, 1536): ((56, 76, 1064), (110, 148, 4070)),
    (4000, 3000): ((56, 74, 1036), (112, 150, 4200)),
    (4, 10000): (REFUSED, (512, 2, 256)),
    (7140, 28): ((2, 510, 255), (2, 510, 255)),
    (7168, 28): (REFUSED, (2, 512, 256)),
    (20000, 28): (REFUSED, (2, 512, 256)),
    (12000, 12000): ((64, 64, 1024), (128, 128, 4096)),
    (32, 48): ((4, 4, 4), (4, 4, 4)),
    (57, 33): ((4, 6, 6), (4, 6, 6)),
    (1792, 1792): ((64, 64, 1024), (128, 128, 4096)),
    (1024, 1024): ((66, 66, 1089), (74, 74, 1369)),
    (8000, 100): (REFUSED, (8, 512, 1024)),
    (17, 64): ((6, 2, 3), (6, 2, 3)),
    (13, 13): ((2, 2, 1), (2, 2, 1)),
    (448, 448): ((32, 32, 256), (32, 32, 256)),
    (2048, 1365): ((54, 80, 1080), (98, 148, 3626)),
    (5000, 6000): ((72, 60, 1080), (142, 118, 4189)),
    (2300, 2300): ((66, 66, 1089), (130, 130, 4225)),
}


def check(width: int, height: int, settings: ImageSettings, expected: tuple[int, int, int] | None) -> None:
    if expected is REFUSED:
        with pytest.raises(InvalidRequest, match=r"^image 3: .*512"):
            place_image(width, height, 3, settings)
        return
    grid = place_image(width, height, 3, settings).grid
    assert (*grid, num_image_tokens((1, *grid))) == expected


@pytest.mark.parametrize("size", REFERENCE, ids=str)
def test_reference_table_of_kimi_vl(size: tuple[int, int]) -> None:
    check(*size, KIMI_VL, REFERENCE[size][0])


@pytest.mark.parametrize("size", REFERENCE, ids=str)
def test_reference_table_of_k25(size: tuple[int, int]) -> None:
    check(*size, KIMI_K25, REFERENCE[size][1])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1792, 1792), (128, 128, 4096)),
        ((1920, 1080), (78, 138, 2691)),
        ((4000, 3000), (112, 150, 4200)),
        ((640, 480), (36, 46, 414)),
        ((8000, 100), REFUSED),
    ],
)
def test_kimi_vl_with_the_limit_of_thinking_2506(size: tuple[int, int], expected: tuple[int, int, int] | None) -> None:
    check(*size, VL_2506, expected)


@pytest.mark.parametrize(
    ("settings", "size", "resized"),
    [
        (KIMI_VL, (1792, 1792), (896, 896)),
        (KIMI_VL, (1920, 1080), (1196, 672)),
        (KIMI_VL, (4000, 3000), (1036, 777)),
        (KIMI_VL, (1024, 1024), (897, 897)),
        (VL_2506, (4000, 3000), (2073, 1554)),
        (KIMI_VL, (640, 480), (640, 480)),
        (KIMI_K25, (4000, 3000), (2073, 1554)),
        (KIMI_K25, (5000, 6000), (1637, 1964)),
        (KIMI_K25, (8000, 100), (7168, 89)),
    ],
)
def test_resized_size_before_padding(settings: ImageSettings, size: tuple[int, int], resized: tuple[int, int]) -> None:
    placement = place_image(*size, 0, settings)
    assert (placement.width, placement.height) == resized


@pytest.mark.parametrize(
    ("size", "resized", "grid"), [((1920, 1080), (1196, 672), (48, 86)), ((1280, 720), (1202, 676), (50, 86))]
)
def test_video_frames_have_their_own_limit(
    size: tuple[int, int], resized: tuple[int, int], grid: tuple[int, int]
) -> None:
    placement = place_frames(*size, 4, 0, KIMI_K25)
    assert (placement.width, placement.height) == resized
    assert placement.grid == grid


def test_video_limit_is_shared_by_the_frames_of_a_chunk() -> None:
    shared = replace(KIMI_K25, in_patch_limit_video=4096)
    quarter = replace(KIMI_K25, in_patch_limit=1024)
    assert place_frames(1920, 1080, 4, 0, shared) == place_image(1920, 1080, 0, quarter)
    assert place_frames(1920, 1080, 1, 0, shared) == place_frames(1920, 1080, 1, 0, KIMI_K25)


def test_frames_without_a_limit_of_their_own_use_the_limit_of_images() -> None:
    settings = replace(KIMI_K25, in_patch_limit_each_frame=None)
    assert place_frames(1920, 1080, 4, 0, settings) == place_image(1920, 1080, 0, settings)


@pytest.mark.parametrize("size", [(7140, 28), (7167, 28), (7168, 28), (20000, 28)])
def test_b2_transposed_pictures_have_transposed_grids(size: tuple[int, int]) -> None:
    width, height = size
    for settings in (KIMI_VL, KIMI_K25):
        outcomes = []
        for a, b in ((width, height), (height, width)):
            try:
                outcomes.append(place_image(a, b, 0, settings).grid)
            except InvalidRequest:
                outcomes.append(REFUSED)
        assert outcomes[0] == (outcomes[1] and outcomes[1][::-1])


def test_b2_limits_of_the_two_families_are_one_apart() -> None:
    assert place_image(7140, 28, 0, KIMI_VL).grid == (2, 510)
    with pytest.raises(InvalidRequest, match="512"):
        place_image(7141, 28, 0, KIMI_VL)
    assert place_image(7141, 28, 0, KIMI_K25).grid == (2, 512)


SIDES = (1, 13, 14, 15, 27, 28, 29, 55, 56, 57, 100, 223, 224, 225, 700, 840, 1366, 1920, 2048, 4000)


@pytest.mark.parametrize("settings", [KIMI_VL, KIMI_K25], ids=lambda settings: settings.family)
def test_b4_token_counts_of_400_sizes(settings: ImageSettings) -> None:
    """Against the padding rule stated the other way round: a token for every 28x28 cell that the picture touches."""
    for width, height in itertools.product(SIDES, SIDES):
        placement = place_image(width, height, 0, settings)
        cells = math.ceil(placement.width / 28) * math.ceil(placement.height / 28)
        assert num_image_tokens((1, *placement.grid)) == cells
        assert placement.width <= width
        assert placement.height <= height


@pytest.mark.parametrize(
    ("size", "box"), [((61, 90), (2, 3, 58, 87)), ((28, 28), (0, 0, 28, 28)), ((59, 57), (2, 0, 58, 56))]
)
def test_without_padding_the_middle_is_cut_out(size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    assert place_image(*size, 0, CUTTING).box == box


def test_without_padding_a_picture_below_one_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^image 5: 27x400 .* 28 pixels"):
        place_image(27, 400, 5, CUTTING)


@given(
    width=st.integers(1, 30_000),
    height=st.integers(1, 30_000),
    settings=st.sampled_from([KIMI_VL, VL_2506, KIMI_K25, CUTTING, replace(KIMI_K25, patch_limit_on_one_side=64)]),
)
def test_every_grid_is_even_positive_and_within_the_limits(width: int, height: int, settings: ImageSettings) -> None:
    try:
        placement = place_image(width, height, 0, settings)
    except InvalidRequest:
        assert settings.family == "kimi_vl"
        return
    rows, columns = placement.grid
    assert rows % 2 == columns % 2 == 0
    assert min(rows, columns) >= 2
    assert max(rows, columns) <= settings.patch_limit_on_one_side
    assert num_image_tokens((1, rows, columns)) * 4 == rows * columns
    left, top, right, bottom = placement.box
    assert (right - left, bottom - top) == (columns * 14, rows * 14)
    # On top of the limit come a cell of padding and the part of a patch that counting whole ones leaves out.
    slack = (1 + 1 / max(1, width // 14)) * (1 + 1 / max(1, height // 14))
    assert (rows - 2) * (columns - 2) <= settings.in_patch_limit * slack


@given(width=st.integers(1, 5000), height=st.integers(1, 5000))
def test_pictures_within_the_limit_are_never_resized(width: int, height: int) -> None:
    placement = place_image(width, height, 0, KIMI_K25)
    if max(1, width // 14) * max(1, height // 14) <= 16384:
        assert (placement.width, placement.height) == (width, height)
    else:
        assert placement.width < width
        assert placement.height < height


@given(width=st.integers(300, 20_000), height=st.integers(300, 20_000))
def test_shrinking_keeps_the_aspect_ratio(width: int, height: int) -> None:
    placement = place_image(width, height, 0, KIMI_K25)
    assert placement.width / width == pytest.approx(placement.height / height, abs=1 / 300)
