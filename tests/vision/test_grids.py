# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import InvalidRequest
from kimi_triton.vision.grids import check_grids, num_image_tokens, num_patches

# (w, h) of pictures -> (h, w) in patches and tokens: the table of the reference processors.
TABLE = [((2, 2), 1), ((2, 4), 2), ((36, 46), 414), ((58, 30), 435), ((144, 2), 72), ((112, 150), 4200)]


@pytest.mark.parametrize(("sides", "tokens"), TABLE)
def test_tokens_and_patches_of_the_reference_table(sides: tuple[int, int], tokens: int) -> None:
    h, w = sides
    assert num_image_tokens((1, h, w)) == tokens
    assert num_patches((1, h, w)) == 4 * tokens


def test_frames_add_patches_but_no_tokens() -> None:
    assert num_patches((4, 6, 8)) == 4 * num_patches((1, 6, 8))
    assert num_image_tokens((4, 6, 8)) == num_image_tokens((1, 6, 8))


def test_good_grids_pass(k25_checkpoint: Checkpoint) -> None:
    check_grids([(1, 2, 512), (4, 4, 6)], 1024 + 96, k25_checkpoint.config.vision)
    check_grids([], 0, k25_checkpoint.config.vision)


@pytest.mark.parametrize("grid", [(1, 0, 4), (1, 4, 3), (1, 514, 2), (0, 4, 4), (5, 4, 4), (1, -2, 4)])
def test_a_bad_grid_names_its_image(k25_checkpoint: Checkpoint, grid: tuple[int, int, int]) -> None:
    grids = [(1, 2, 2), grid]
    with pytest.raises(InvalidRequest, match=r"^image 1: grid has -?\d+ "):
        check_grids(grids, sum(map(num_patches, grids)), k25_checkpoint.config.vision)


def test_kimi_vl_has_no_video(vl_checkpoint: Checkpoint) -> None:
    with pytest.raises(InvalidRequest, match="image 0: grid has 2 frames, expected 1 to 1"):
        check_grids([(2, 4, 4)], 32, vl_checkpoint.config.vision)


def test_too_few_patches_name_both_counts(k25_checkpoint: Checkpoint) -> None:
    with pytest.raises(InvalidRequest, match="pixel_values has 5 patches, image_grid_thw describes 28"):
        check_grids([(1, 2, 14)], 5, k25_checkpoint.config.vision)
