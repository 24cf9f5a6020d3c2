# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a checkpoint is accounted for, or loading says which one is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_triton.checkpoint import INDEX, Checkpoint
from kimi_triton.config import CheckpointConfig, VisionConfig
from kimi_triton.demo.tiny import save_sharded, write_tiny_checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.inventory import expected_tensors, language_tensors, vision_tensors

RELEASED_TEXT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}


@pytest.fixture
def copy(tiny_k25: Path, tmp_path: Path) -> Path:
    """A checkpoint in three shards that a test may damage."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_k25, folder)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
        file.unlink()
    save_sharded(folder, weights, num_shards=3)
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def rewrite_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    for name, file in changes.items():
        index["weight_map"].pop(name) if file is None else index["weight_map"].update({name: file})
    (folder / INDEX).write_text(json.dumps(index))


def rewrite_shard(file: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(file)
    for name, weight in changes.items():
        weights.pop(name) if weight is None else weights.update({name: weight})
    save_file(weights, file)


def holder(folder: Path, name: str) -> Path:
    """The shard that holds the tensor `name`."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpoint(folder)
    for word in words:
        assert word in str(caught.value)


def test_released_inventories_match_the_published_counts() -> None:
    """5,652 tensors and 16,407,656,048 parameters for Kimi-VL, 208,550 tensors for K2.5: facts of the spec."""
    sizes = {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152, "intermediate_size": 4304}
    sides = {"pos_emb_height": 64, "pos_emb_width": 64}
    vl = VisionConfig(family="kimi_vl", pos_emb_time=1, text_hidden_size=2048, **sizes, **sides)
    text = RELEASED_TEXT | {
        "vocab_size": 163840, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "q_lora_rank": None,
    }  # fmt: skip
    shapes = vision_tensors(vl) | language_tensors(text)
    assert (len(shapes), sum(map(prod, shapes.values()))) == (5652, 16_407_656_048)

    k25 = VisionConfig(family="kimi_k25", pos_emb_time=4, text_hidden_size=7168, **sizes, **sides)
    text = RELEASED_TEXT | {
        "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 1536,
    }  # fmt: skip
    vision = vision_tensors(k25)
    assert len(vision) == 329 + 6
    assert sum(prod(shape) for name, shape in vision.items() if name.startswith("vision_tower")) == 416_866_032
    assert len(vision | language_tensors(text, group_size=32)) == 208_550


@pytest.mark.parametrize("family", ["tiny_k25", "tiny_vl"])
def test_a_good_checkpoint_is_read_as_stored(family: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(family))
    read = dict(checkpoint.read(checkpoint.names("")))
    assert {name: tuple(weight.shape) for name, weight in read.items()} == expected_tensors(checkpoint.config)
    biases = [name for name in read if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(read[name].dtype is torch.float32 for name in biases)
    assert all(weight.dtype is torch.bfloat16 for name, weight in read.items() if name not in biases)


def test_the_same_seed_writes_the_same_bytes(tiny_k25: Path, tmp_path: Path) -> None:
    again = write_tiny_checkpoint(tmp_path / "again")
    other = write_tiny_checkpoint(tmp_path / "other", seed=1)
    for file in shards(tiny_k25):
        assert (again / file.name).read_bytes() == file.read_bytes()
        assert (other / file.name).read_bytes() != file.read_bytes()


def test_j3_a_missing_shard_is_named(copy: Path) -> None:
    shards(copy)[1].unlink()
    refused(copy, "model-00002-of-000003.safetensors is missing")


def test_j3_a_truncated_shard_is_named(copy: Path) -> None:
    file = shards(copy)[2]
    file.write_bytes(file.read_bytes()[:-1024])
    refused(copy, file.name, "truncated")


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}trailing"])
def test_j3_a_damaged_shard_is_named(content: bytes, copy: Path) -> None:
    shards(copy)[0].write_bytes(content)
    refused(copy, shards(copy)[0].name)


def test_j3_a_tensor_that_the_index_forgets_is_named(copy: Path) -> None:
    rewrite_index(copy, **{"language_model.model.norm.weight": None})
    refused(copy, "language_model.model.norm.weight")


def test_j3_a_tensor_in_another_shard_than_indexed_is_named(copy: Path) -> None:
    name = "vision_tower.patch_embed.proj.bias"
    other = next(file for file in shards(copy) if file != holder(copy, name))
    rewrite_index(copy, **{name: other.name})
    refused(copy, name)


def test_j3_a_missing_tensor_is_named(copy: Path) -> None:
    name = "vision_tower.encoder.blocks.1.wqkv.bias"
    rewrite_shard(holder(copy, name), **{name: None})
    rewrite_index(copy, **{name: None})
    refused(copy, "missing tensors", name)


def test_j3_an_unexpected_tensor_is_named(copy: Path) -> None:
    file = shards(copy)[0]
    rewrite_shard(file, extra=torch.zeros(1))
    rewrite_index(copy, extra=file.name)
    refused(copy, "unexpected tensors: extra")


def test_j3_a_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    name = "vision_tower.patch_embed.proj.bias"
    rewrite_shard(holder(copy, name), **{name: torch.zeros(65)})
    refused(copy, name, "[65]", "[64]")


def test_j3_several_shards_without_an_index_are_refused(copy: Path) -> None:
    (copy / INDEX).unlink()
    refused(copy, INDEX, "3 other safetensors files")


def test_an_index_cannot_point_outside_the_folder(copy: Path) -> None:
    rewrite_index(copy, **{"language_model.model.norm.weight": "../outside.safetensors"})
    refused(copy, "../outside.safetensors")


def test_integer_vision_weights_are_refused(copy: Path) -> None:
    name = "vision_tower.patch_embed.proj.bias"
    rewrite_shard(holder(copy, name), **{name: torch.zeros(64, dtype=torch.int32)})
    refused(copy, name, "I32")


def test_stored_rotary_caches_are_ignored(copy: Path) -> None:
    file, name = shards(copy)[0], "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_shard(file, **{name: torch.zeros(32)})
    rewrite_index(copy, **{name: file.name})
    assert name not in Checkpoint(copy).tensors


def test_a_single_file_needs_no_index(copy: Path) -> None:
    weights: dict[str, torch.Tensor] = {}
    for file in shards(copy):
        weights |= load_file(file)
        file.unlink()
    (copy / INDEX).unlink()
    save_file(weights, copy / "model.safetensors")
    assert len(Checkpoint(copy).tensors) == len(weights)


def test_code_beside_the_weights_is_never_imported(copy: Path) -> None:
    for name in ("modeling_kimi_k25", "configuration_kimi_k25", "tokenization_kimi"):
        (copy / f"{name}.py").write_text("raise SystemExit('imported')")
    raw = json.loads((copy / "config.json").read_text())
    raw["auto_map"] = {"AutoModel": "modeling_kimi_k25.KimiK25", "AutoConfig": "configuration_kimi_k25.Config"}
    (copy / "config.json").write_text(json.dumps(raw))
    assert CheckpointConfig.from_checkpoint(copy) == Checkpoint(copy).config


def test_opening_a_checkpoint_does_not_import_torch(tiny_k25: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kimi_triton.checkpoint import Checkpoint;"
        f"Checkpoint(Path({str(tiny_k25)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
