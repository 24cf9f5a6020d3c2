# SPDX-License-Identifier: Apache-2.0
"""preprocessor_config.json of both families."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_triton.config import Family
from kimi_triton.errors import ConfigError
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.preprocess.sizes import place_image
from tests.preprocess.pictures import KIMI_K25

VL_FILE: dict[str, Any] = {
    "image_processor_type": "KimiVLImageProcessor",
    "patch_size": 14,
    "pad_input": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "in_token_limit": 4096,
    "merge_kernel_size": [2, 2],
    "num_pooled_tokens": 1024,
}
K25_VALUES: dict[str, Any] = {
    "in_patch_limit": 16384,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}
K25_FILE = {"media_proc_cfg": K25_VALUES}


def read(folder: Path, family: Family, content: dict[str, Any]) -> ImageSettings:
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return ImageSettings.from_checkpoint(folder, family)


def test_released_kimi_vl_values(tmp_path: Path) -> None:
    settings = read(tmp_path, "kimi_vl", VL_FILE | {"in_token_limit": 16384, "image_std": [0.25, 0.5, 1]})
    assert settings == ImageSettings(
        family="kimi_vl", in_patch_limit=16384, image_mean=(0.5, 0.5, 0.5), image_std=(0.25, 0.5, 1.0)
    )


def test_released_k25_values(tmp_path: Path) -> None:
    values = K25_VALUES | {
        "in_patch_limit": 1000,
        "image_mean": [0.1, 0.2, 0.3],
        "patch_limit_on_one_side": 128,
        "in_patch_limit_each_frame": 500,
        "in_patch_limit_video": 3000,
        "sample_fps": 4,
        "max_num_frames_each_video": 64,
        "temporal_merge_kernel_size": 2,
    }
    assert read(tmp_path, "kimi_k25", {"media_proc_cfg": values}) == ImageSettings(
        family="kimi_k25",
        in_patch_limit=1000,
        image_mean=(0.1, 0.2, 0.3),
        image_std=(0.5, 0.5, 0.5),
        patch_limit_on_one_side=128,
        in_patch_limit_each_frame=500,
        in_patch_limit_video=3000,
        sample_fps=4.0,
        max_num_frames_each_video=64,
        temporal_merge_kernel_size=2,
    )


def test_tiny_checkpoints_are_read(tiny_vl: Path, tiny_k25: Path) -> None:
    assert ImageSettings.from_checkpoint(tiny_vl, "kimi_vl").in_patch_limit == 4096
    assert ImageSettings.from_checkpoint(tiny_k25, "kimi_k25") == KIMI_K25


def test_limits_of_the_server_are_options_not_checkpoint_values(tmp_path: Path) -> None:
    assert read(tmp_path, "kimi_vl", VL_FILE | {"max_pixels": 5}).max_pixels == 100_000_000
    settings = ImageSettings.from_checkpoint(tmp_path, "kimi_vl", max_pixels=1000, max_image_bytes=2000)
    assert (settings.max_pixels, settings.max_image_bytes) == (1000, 2000)


def test_j4_nested_limit_is_honoured(tmp_path: Path) -> None:
    settings = read(tmp_path, "kimi_k25", {"media_proc_cfg": K25_VALUES | {"in_patch_limit": 1024}})
    assert settings.in_patch_limit == 1024
    # 57 x 42 whole patches; scale sqrt(1024 / 2394) gives 523x392 pixels, padded to 532x392.
    assert place_image(800, 600, 0, settings).grid == (28, 38)
    assert place_image(800, 600, 0, KIMI_K25).grid == (44, 58)


def test_j4_top_level_values_are_accepted(tmp_path: Path) -> None:
    nested = read(tmp_path, "kimi_k25", {"media_proc_cfg": K25_VALUES | {"in_patch_limit": 1024}})
    assert read(tmp_path, "kimi_k25", K25_VALUES | {"in_patch_limit": 1024}) == nested


def test_j4_equal_values_in_both_places_are_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, "kimi_k25", K25_FILE | {"image_mean": [0.5, 0.5, 0.5]}) == KIMI_K25


def test_j4_contradiction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in_patch_limit is 1024 but media_proc_cfg\.in_patch_limit is 16384"):
        read(tmp_path, "kimi_k25", K25_FILE | {"in_patch_limit": 1024})


def test_j4_kimi_vl_class_defaults(tmp_path: Path) -> None:
    """A file without pad_input means cutting, as the processor class does; the released files ask for padding."""
    settings = read(tmp_path, "kimi_vl", {"patch_size": 14})
    assert not settings.pad_input
    assert settings.in_patch_limit == 4096
    assert settings.image_mean[0] == 0.48145466
    assert settings.image_std[2] == 0.27577711


@pytest.mark.parametrize("family", ["kimi_vl", "kimi_k25"])
def test_j4_missing_file_is_refused(tmp_path: Path, family: Family) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json is missing"):
        ImageSettings.from_checkpoint(tmp_path, family)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 16),
        ("merge_kernel_size", 1),
        ("merge_kernel_size", [2, 4]),
        ("fixed_output_tokens", 256),
        ("timestamp_mode", "mm:ss"),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", 0.5),
        ("image_std", [0.5, 0.5, 0.0]),
        ("image_std", ["0.5", 0.5, 0.5]),
        ("in_patch_limit", 0),
        ("in_patch_limit", "16384"),
        ("in_patch_limit", True),
        ("in_patch_limit_each_frame", -1),
        ("patch_limit_on_one_side", 514),
        ("patch_limit_on_one_side", 511),
        ("sample_fps", 0),
        ("temporal_merge_kernel_size", 8),
    ],
)
def test_unimplemented_k25_values_are_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, "kimi_k25", {"media_proc_cfg": K25_VALUES | {key: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [("patch_size", 16), ("merge_kernel_size", [4, 4]), ("in_token_limit", None), ("pad_input", "yes")],
)
def test_unimplemented_kimi_vl_values_are_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, "kimi_vl", VL_FILE | {key: value})


@pytest.mark.parametrize("key", ["in_patch_limit", "image_mean", "image_std"])
def test_missing_k25_values_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, "kimi_k25", {"media_proc_cfg": {k: v for k, v in K25_VALUES.items() if k != key}})


@pytest.mark.parametrize(
    "change",
    [
        {"family": "kimi_vl"},
        {"in_patch_limit": 1024},
        {"in_patch_limit_each_frame": 1024},
        {"in_patch_limit_video": 1024},
        {"patch_limit_on_one_side": 256},
        {"pad_input": False},
        {"image_mean": (0.4, 0.5, 0.5)},
        {"image_std": (0.4, 0.5, 0.5)},
    ],
)
def test_f3_fingerprint_follows_what_shapes_the_embeddings(change: dict[str, Any]) -> None:
    assert replace(KIMI_K25, **change).fingerprint != KIMI_K25.fingerprint


def test_fingerprint_ignores_limits_that_only_refuse() -> None:
    assert replace(KIMI_K25, max_pixels=1, max_image_bytes=1).fingerprint == KIMI_K25.fingerprint
