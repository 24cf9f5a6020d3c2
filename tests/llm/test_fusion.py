# SPDX-License-Identifier: Apache-2.0
"""Image rows take the places of placeholders, or the request is refused with both numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kimi_triton.errors import InvalidRequest, KimiError
from kimi_triton.llm.fusion import check_placeholders, merge_image_rows, placeholder_runs

MEDIA = 99


def prompt(*runs: int) -> np.ndarray:
    return np.array([1, *(token for run in runs for token in [*[MEDIA] * run, 2])], dtype=np.int32)


def grids(*sizes: tuple[int, int, int]) -> np.ndarray:
    return np.array(sizes, dtype=np.int64).reshape(-1, 3)


@pytest.mark.parametrize(("slots", "rows"), [(64, 63), (64, 65), (64, 0), (0, 64), (64, 1)])
def test_c4_unequal_counts_are_refused_with_both_numbers(slots: int, rows: int) -> None:
    is_placeholder = torch.arange(70) < slots
    with pytest.raises(InvalidRequest, match=rf"{slots} image placeholders, but image_embeds has {rows} rows"):
        merge_image_rows(torch.zeros(70, 4), is_placeholder, torch.ones(rows, 4))
    ids = prompt(slots) if slots else prompt()
    with pytest.raises(InvalidRequest, match=rf"{slots} image placeholders, but image_embeds has {rows} rows"):
        check_placeholders(ids, grids((1, 16, 16)), rows, MEDIA)


def test_c4_equal_counts_put_row_k_into_place_k() -> None:
    text, rows = -torch.arange(12.0).view(6, 2), torch.arange(6.0).view(3, 2) + 100
    merged = merge_image_rows(text.clone(), torch.tensor([False, True, True, False, True, False]), rows.bfloat16())
    assert torch.equal(merged, torch.stack([text[0], rows[0], rows[1], text[3], rows[2], text[5]]))


def test_a_text_prompt_needs_no_rows() -> None:
    text = torch.ones(3, 2)
    assert torch.equal(merge_image_rows(text.clone(), torch.zeros(3, dtype=torch.bool), torch.zeros(0, 2)), text)
    check_placeholders(prompt(), grids(), 0, MEDIA)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"\[8\], the language model takes \[4\]"):
        merge_image_rows(torch.zeros(2, 4), torch.tensor([True, False]), torch.zeros(1, 8))


def test_d1_rows_that_are_not_finite_are_refused() -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = torch.nan
    with pytest.raises(KimiError, match="1 rows of 3"):
        merge_image_rows(torch.zeros(3, 4), torch.ones(3, dtype=torch.bool), rows)


def test_c7_runs_of_several_images_follow_their_grids() -> None:
    check_placeholders(prompt(64, 750, 1), grids((1, 16, 16), (1, 50, 60), (1, 2, 2)), 815, MEDIA)
    with pytest.raises(InvalidRequest, match=r"image 0: input_ids has 64 placeholders, its grid \[1, 50, 60\]"):
        check_placeholders(prompt(64, 750, 1), grids((1, 50, 60), (1, 16, 16), (1, 2, 2)), 815, MEDIA)


def test_frames_of_a_chunk_are_averaged_into_the_tokens_of_one() -> None:
    check_placeholders(prompt(4), grids((4, 4, 4)), 4, MEDIA)


def test_rows_shifted_between_two_images_are_refused_by_index() -> None:
    with pytest.raises(InvalidRequest, match="image 1: input_ids has 5 placeholders"):
        check_placeholders(prompt(4, 5, 3), grids((1, 4, 4), (1, 4, 4), (1, 4, 4)), 12, MEDIA)


def test_a_run_without_a_grid_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 runs of image placeholders, but image_grid_thw describes 1 images"):
        check_placeholders(prompt(2, 2), grids((1, 4, 4)), 4, MEDIA)


@pytest.mark.parametrize("grid", [(1, 3, 4), (1, 4, 5), (0, 4, 4), (1, -4, -4), (1, 0, 4)])
def test_odd_and_empty_grids_are_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match="image 0: grid"):
        check_placeholders(prompt(4), grids(grid), 4, MEDIA)


def test_a_grid_of_two_columns_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"image_grid_thw has shape \[1, 2\]"):
        check_placeholders(prompt(4), np.array([[4, 4]]), 4, MEDIA)


def test_runs_at_both_ends_are_found() -> None:
    assert placeholder_runs(np.array([MEDIA, MEDIA, 1, MEDIA]), MEDIA) == [2, 1]
    assert placeholder_runs(np.array([1, 2]), MEDIA) == []
