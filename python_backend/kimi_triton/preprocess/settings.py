# SPDX-License-Identifier: Apache-2.0
"""What preprocessor_config.json says about pictures, plus the two limits of this server.

Kimi-VL keeps its values at the top level, Kimi-K2.5 under `media_proc_cfg`. The limit is called in_token_limit by
Kimi-VL although it counts patches before merging, as K2.5's in_patch_limit does; here both are in_patch_limit.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_triton.config import MERGE_KERNEL_SIZE, PATCH_SIZE, Family, read_json
from kimi_triton.errors import ConfigError

FILE = "preprocessor_config.json"
POSITIONS_PER_SIDE = 512  # rotary positions on each axis
MAX_CHUNK_FRAMES = 4  # temporal position rows of MoonViT
MAX_PIXELS = 100_000_000  # decoded size; 400 MB while Pillow holds the picture
MAX_IMAGE_BYTES = 64 * 1024 * 1024  # encoded size
MAX_JPEG_SCANS = 100  # encoders write about ten; each one is another pass over the whole picture

RGB = tuple[float, float, float]

# Defaults of the Kimi-VL image processor, for keys its file leaves out. The processor of K2.5 has no such defaults.
KIMI_VL_DEFAULTS: dict[str, Any] = {
    "in_token_limit": 4096,
    "pad_input": False,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
KIMI_K25_KEYS = (
    "in_patch_limit",
    "patch_size",
    "image_mean",
    "image_std",
    "merge_kernel_size",
    "fixed_output_tokens",
    "patch_limit_on_one_side",
    "in_patch_limit_each_frame",
    "in_patch_limit_video",
    "sample_fps",
    "max_num_frames_each_video",
    "temporal_merge_kernel_size",
    "timestamp_mode",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """How pictures become patches. Limits called `patch` count 14x14 patches before merging."""

    family: Family
    in_patch_limit: int
    image_mean: RGB  # of values in 0..1; the vision tower folds mean and std into its patch embedding
    image_std: RGB
    pad_input: bool = True  # False: cut to the grid instead of padding; a choice only Kimi-VL has
    patch_limit_on_one_side: int = POSITIONS_PER_SIDE
    in_patch_limit_each_frame: int | None = None  # None: as in_patch_limit
    in_patch_limit_video: int | None = None
    sample_fps: float = 2.0
    max_num_frames_each_video: int | None = None
    temporal_merge_kernel_size: int = 1  # frames in a chunk at most; 1 for Kimi-VL, which has no video
    max_pixels: int = MAX_PIXELS
    max_image_bytes: int = MAX_IMAGE_BYTES

    @classmethod
    def from_checkpoint(
        cls, folder: Path, family: Family, *, max_pixels: int = MAX_PIXELS, max_image_bytes: int = MAX_IMAGE_BYTES
    ) -> ImageSettings:
        """Read `folder`/preprocessor_config.json.

        Raises ConfigError when the file is missing, contradicts itself or asks for what is not implemented.
        """
        raw = read_json(folder / FILE)
        values = _kimi_vl_values(raw) if family == "kimi_vl" else _kimi_k25_values(raw)
        return cls(family=family, max_pixels=max_pixels, max_image_bytes=max_image_bytes, **values)

    @property
    def fingerprint(self) -> bytes:
        """Every setting that shapes pixels, grids or embeddings, as bytes that are equal in every process."""
        values = asdict(self)
        del values["max_pixels"], values["max_image_bytes"]  # they refuse pictures, they never change one
        return json.dumps(values, sort_keys=True).encode()


def _kimi_vl_values(raw: dict[str, Any]) -> dict[str, Any]:
    raw = KIMI_VL_DEFAULTS | raw
    _refuse_unimplemented(raw)
    if not isinstance(raw["pad_input"], bool):
        raise ConfigError(f"{FILE}: pad_input is {raw['pad_input']!r}, expected true or false")
    return {
        "in_patch_limit": _count(raw, "in_token_limit"),
        "image_mean": _three_numbers(raw, "image_mean"),
        "image_std": _three_numbers(raw, "image_std", positive=True),
        "pad_input": raw["pad_input"],
    }


def _kimi_k25_values(raw: dict[str, Any]) -> dict[str, Any]:
    media = _media_proc_cfg(raw)
    _refuse_unimplemented(media)
    return {
        "in_patch_limit": _count(media, "in_patch_limit"),
        "image_mean": _three_numbers(media, "image_mean"),
        "image_std": _three_numbers(media, "image_std", positive=True),
        "patch_limit_on_one_side": _side_limit(media),
        "in_patch_limit_each_frame": _optional_count(media, "in_patch_limit_each_frame"),
        "in_patch_limit_video": _optional_count(media, "in_patch_limit_video"),
        "sample_fps": _positive_number(media, "sample_fps", default=2.0),
        "max_num_frames_each_video": _optional_count(media, "max_num_frames_each_video"),
        "temporal_merge_kernel_size": _chunk_frames(media),
    }


def _media_proc_cfg(raw: dict[str, Any]) -> dict[str, Any]:
    """The K2.5 values, nested as released or at the top level; a key in both places must hold the same value."""
    nested = raw.get("media_proc_cfg", {})
    if not isinstance(nested, dict):
        raise ConfigError(f"{FILE}: media_proc_cfg is a {type(nested).__name__}, expected a JSON object")
    top = {key: raw[key] for key in KIMI_K25_KEYS if key in raw}
    for key in top.keys() & nested.keys():
        if top[key] != nested[key]:
            raise ConfigError(f"{FILE}: {key} is {top[key]!r} but media_proc_cfg.{key} is {nested[key]!r}")
    return top | nested


def _refuse_unimplemented(values: dict[str, Any]) -> None:
    merge = values.get("merge_kernel_size", MERGE_KERNEL_SIZE)
    merge = [merge, merge] if isinstance(merge, int) else merge
    for key, found, implemented in (
        ("patch_size", values.get("patch_size", PATCH_SIZE), PATCH_SIZE),
        ("merge_kernel_size", merge if merge is None else list(merge), list(MERGE_KERNEL_SIZE)),
        ("fixed_output_tokens", values.get("fixed_output_tokens"), None),
        ("timestamp_mode", values.get("timestamp_mode", "hh:mm:ss.fff"), "hh:mm:ss.fff"),
    ):
        if found != implemented:
            raise ConfigError(f"{FILE}: {key} is {json.dumps(found)}, only {json.dumps(implemented)} is implemented")


def _count(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{FILE}: {key} is {value!r}, expected a positive integer")
    return value


def _optional_count(values: dict[str, Any], key: str) -> int | None:
    return None if values.get(key) is None else _count(values, key)


def _side_limit(values: dict[str, Any]) -> int:
    limit = _optional_count(values, "patch_limit_on_one_side") or POSITIONS_PER_SIDE
    if limit > POSITIONS_PER_SIDE or limit % 2:
        raise ConfigError(f"{FILE}: patch_limit_on_one_side is {limit}, expected an even number up to 512")
    return limit


def _chunk_frames(values: dict[str, Any]) -> int:
    frames = _optional_count(values, "temporal_merge_kernel_size") or MAX_CHUNK_FRAMES
    if frames > MAX_CHUNK_FRAMES:
        raise ConfigError(f"{FILE}: temporal_merge_kernel_size is {frames}, MoonViT has positions for 4 frames")
    return frames


def _positive_number(values: dict[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    if not _is_number(value) or value <= 0:
        raise ConfigError(f"{FILE}: {key} is {value!r}, expected a positive number")
    return float(value)


def _three_numbers(values: dict[str, Any], key: str, positive: bool = False) -> RGB:
    value = values.get(key)
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(map(_is_number, value)):
        raise ConfigError(f"{FILE}: {key} is {value!r}, expected three numbers")
    if positive and min(value) <= 0:
        raise ConfigError(f"{FILE}: {key} is {value!r}, expected numbers above 0")
    red, green, blue = map(float, value)
    return red, green, blue


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
