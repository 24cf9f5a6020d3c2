# SPDX-License-Identifier: Apache-2.0
"""config.json of both families, in both spellings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_triton.config import CheckpointConfig, read_json
from kimi_triton.errors import ConfigError

Edit = Callable[[dict[str, Any]], None]


def edited(source: Path, folder: Path, edit: Edit) -> Path:
    raw = json.loads((source / "config.json").read_text())
    edit(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_j1_released_k25_spelling_alone_is_read(tiny_k25: Path, tmp_path: Path) -> None:
    def only_released(raw: dict[str, Any]) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            del raw["vision_config"][name]
        for axis in ("height", "width", "time"):
            del raw["vision_config"][f"pos_emb_{axis}"]

    config = CheckpointConfig.from_checkpoint(edited(tiny_k25, tmp_path, only_released))
    assert (config.family, config.vision.hidden_size, config.vision.num_attention_heads) == ("kimi_k25", 64, 4)
    assert (config.vision.pos_emb_height, config.vision.pos_emb_time) == (16, 4)
    assert config.vision.head_dim == 16


def test_j1_native_spelling_alone_is_read(tiny_k25: Path, tmp_path: Path) -> None:
    def only_native(raw: dict[str, Any]) -> None:
        raw["vision_config"] = {k: v for k, v in raw["vision_config"].items() if not k.startswith(("vt_", "init_"))}
        del raw["media_placeholder_token_id"]

    config = CheckpointConfig.from_checkpoint(edited(tiny_k25, tmp_path, only_native))
    assert config == CheckpointConfig.from_checkpoint(tiny_k25)


def test_j1_kimi_vl_values_come_from_the_file(tiny_vl: Path, tmp_path: Path) -> None:
    config = CheckpointConfig.from_checkpoint(
        edited(tiny_vl, tmp_path, lambda raw: raw["vision_config"].update(num_hidden_layers=5))
    )
    assert config.vision.num_hidden_layers == 5
    assert config.vision.pos_emb_time == 1
    assert config.vision.projector_prefix == "multi_modal_projector"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda raw: raw["vision_config"].update(vt_hidden_size=128), ["vt_hidden_size = 128", "hidden_size = 64"]),
        (lambda raw: raw["vision_config"].update(pos_emb_width=8), ["init_pos_emb_width = 16", "pos_emb_width = 8"]),
        (lambda raw: raw.update(image_token_id=7), ["media_placeholder_token_id", "image_token_id = 7"]),
        (lambda raw: raw["vision_config"].update(mm_hidden_size=65), ["mm_hidden_size is 65", "64"]),
        (lambda raw: raw["vision_config"].update(text_hidden_size=99), ["text_hidden_size is 99", "128"]),
        (lambda raw: raw.update(model_type="kimi_k3"), ["'kimi_k3'", "kimi_vl", "kimi_k25"]),
        (lambda raw: raw["text_config"].update(model_type="llama"), ["'llama'", "deepseek_v3"]),
        (lambda raw: raw["vision_config"].update(mm_projector_type="patchmergerv2"), ["patchmergerv2", "patchmerger"]),
        (lambda raw: raw["vision_config"].update(merge_kernel_size=[4, 4]), ["[4, 4]", "[2, 2]"]),
        (lambda raw: raw["vision_config"].update(patch_size=16), ["patch_size is 16", "14"]),
        (lambda raw: raw["vision_config"].update(vt_num_hidden_layers="2"), ["vt_num_hidden_layers"]),
        (lambda raw: raw.pop("vision_config"), ["vision_config is missing"]),
        (
            lambda raw: [raw["vision_config"].pop(f"{p}num_hidden_layers") for p in ("vt_", "")],
            ["vt_num_hidden_layers or num_hidden_layers is missing"],
        ),
        (
            lambda raw: raw["vision_config"].update(vt_num_attention_heads=5, num_attention_heads=5),
            ["64 does not divide into 5"],
        ),
    ],
)
def test_j1_contradictions_and_unknown_values_are_refused_by_name(
    edit: Edit, named: list[str], tiny_k25: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_checkpoint(edited(tiny_k25, tmp_path, edit))
    for words in named:
        assert words in str(caught.value)


QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
    },
}


@pytest.mark.parametrize("places", [("top",), ("nested",), ("top", "nested")])
def test_j2_quantization_is_found_at_either_level(places: tuple[str, ...], tiny_k25: Path, tmp_path: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        for place in places:
            (raw if place == "top" else raw["text_config"])["quantization_config"] = QUANTIZED

    assert CheckpointConfig.from_checkpoint(edited(tiny_k25, tmp_path, edit)).quantization == QUANTIZED


def test_j2_two_different_quantizations_are_refused(tiny_k25: Path, tmp_path: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        raw["quantization_config"] = QUANTIZED
        raw["text_config"]["quantization_config"] = QUANTIZED | {"format": "dense"}

    with pytest.raises(ConfigError, match=r"differ in format"):
        CheckpointConfig.from_checkpoint(edited(tiny_k25, tmp_path, edit))


def test_stop_ids_come_from_both_levels(tiny_k25: Path, tmp_path: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        raw["eos_token_id"], raw["text_config"]["eos_token_id"] = 5, [6, 7]

    assert CheckpointConfig.from_checkpoint(edited(tiny_k25, tmp_path, edit)).eos_token_ids == {5, 6, 7}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_missing_config_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        CheckpointConfig.from_checkpoint(tmp_path)
