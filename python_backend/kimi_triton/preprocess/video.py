# SPDX-License-Identifier: Apache-2.0
"""Which frames of a Kimi-K2.5 video are looked at, how they are grouped and what time each group is given.

A chunk of frames is one media item: `patches.frames_to_patches` makes its patches, and its prompt begins with the
timestamp of its first frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.settings import ImageSettings


def sample_frame_indices(num_frames: int, fps: float, settings: ImageSettings) -> list[int]:
    """Evenly spread frame numbers, from the first to the last, about sample_fps for each second of the video.

    Raises InvalidRequest unless `num_frames` and `fps` (frames a second) are above zero.
    """
    if num_frames < 1 or not fps > 0:
        raise InvalidRequest(f"a video of {num_frames} frames at {fps} frames a second, both must be above 0")
    num_samples = max(round(num_frames * min(settings.sample_fps, fps) / fps), 1)
    if settings.max_num_frames_each_video is not None:
        num_samples = min(num_samples, settings.max_num_frames_each_video)
    return [int(position) for position in np.linspace(0, num_frames - 1, num_samples).round()]


def split_chunks(frame_indices: Sequence[int], settings: ImageSettings) -> list[list[int]]:
    """Consecutive groups of temporal_merge_kernel_size frame numbers; the last may be shorter."""
    length = settings.temporal_merge_kernel_size
    return [list(frame_indices[start : start + length]) for start in range(0, len(frame_indices), length)]


def chunk_timestamp(frame_index: int, fps: float) -> str:
    """Time of a frame as HH:MM:SS.mmm. Milliseconds are cut, not rounded; the clock starts again after 24 hours."""
    seconds = frame_index / fps
    whole = int(seconds)
    return f"{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"
