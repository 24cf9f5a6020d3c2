# SPDX-License-Identifier: Apache-2.0
"""Which frames of a video are looked at, and when they are said to be."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.video import chunk_timestamp, sample_frame_indices, split_chunks
from tests.preprocess.pictures import KIMI_K25


@pytest.mark.parametrize(
    ("num_frames", "fps", "expected"),
    [
        (1, 30.0, [0]),
        (30, 30.0, [0, 29]),  # one second: two frames, the first and the last
        (10, 1.0, list(range(10))),  # slower than the sampling: every frame
        (90, 30.0, [0, 18, 36, 53, 71, 89]),
        (5, 4.0, [0, 4]),  # 2.5 samples round to the even number
        (7, 4.0, [0, 2, 4, 6]),  # 3.5 samples too
        (4, 2.0, [0, 1, 2, 3]),
        (3, 60.0, [0]),
    ],
)
def test_frames_are_sampled_evenly(num_frames: int, fps: float, expected: list[int]) -> None:
    assert sample_frame_indices(num_frames, fps, KIMI_K25) == expected


def test_the_number_of_frames_can_be_capped() -> None:
    assert sample_frame_indices(3000, 30.0, replace(KIMI_K25, max_num_frames_each_video=3)) == [0, 1500, 2999]


@pytest.mark.parametrize(("num_frames", "fps"), [(0, 30.0), (10, 0.0), (10, -1.0), (10, float("nan"))])
def test_a_video_without_frames_or_speed_is_refused(num_frames: int, fps: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{num_frames} frames at {fps}"):
        sample_frame_indices(num_frames, fps, KIMI_K25)


@given(num_frames=st.integers(1, 10_000), fps=st.floats(0.1, 240))
def test_samples_are_frames_in_order_from_the_first_to_the_last(num_frames: int, fps: float) -> None:
    indices = sample_frame_indices(num_frames, fps, KIMI_K25)
    assert indices[0] == 0
    assert indices == sorted(set(indices))
    assert len(indices) == 1 or indices[-1] == num_frames - 1


@pytest.mark.parametrize(("num_frames", "lengths"), [(1, [1]), (4, [4]), (5, [4, 1]), (11, [4, 4, 3])])
def test_chunks_hold_four_frames_and_the_last_the_rest(num_frames: int, lengths: list[int]) -> None:
    chunks = split_chunks(range(num_frames), KIMI_K25)
    assert [len(chunk) for chunk in chunks] == lengths
    assert [index for chunk in chunks for index in chunk] == list(range(num_frames))


@pytest.mark.parametrize(
    ("frame_index", "fps", "text"),
    [
        (0, 30.0, "00:00:00.000"),
        (7323, 2.0, "01:01:01.500"),
        (1, 3.0, "00:00:00.333"),
        (2, 3.0, "00:00:00.666"),  # cut, not rounded
        (86_400, 1.0, "00:00:00.000"),
        (90_061, 1.0, "01:01:01.000"),
    ],
)
def test_timestamps(frame_index: int, fps: float, text: str) -> None:
    assert chunk_timestamp(frame_index, fps) == text


@given(frame_index=st.integers(0, 10_000_000), fps=st.sampled_from([1.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]))
def test_timestamps_agree_with_the_clock_of_the_system(frame_index: int, fps: float) -> None:
    clock = time.strftime("%H:%M:%S", time.gmtime(frame_index / fps))
    assert chunk_timestamp(frame_index, fps).split(".")[0] == clock
