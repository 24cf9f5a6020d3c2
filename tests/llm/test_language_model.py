# SPDX-License-Identifier: Apache-2.0
"""Loading: the weights of the checkpoint, all of them, in the places where transformers' own loading puts them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Kimi_K25ForConditionalGeneration

from kimi_triton.checkpoint import INDEX, Checkpoint
from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.tiny import save_sharded
from kimi_triton.errors import ConfigError
from kimi_triton.inventory import language_tensors
from kimi_triton.llm.expert_weights import ExpertWeights
from kimi_triton.llm.language_model import load_language_model
from tests.llm.test_quantization import pack

CPU = torch.device("cpu")
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(source: Path, target: Path, weights: dict[str, Tensor], num_shards: int = 3, **text: object) -> Path:
    """A copy of a checkpoint with other weights and other entries in its text_config."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((target / "config.json").read_text())
    config["text_config"] |= text
    (target / "config.json").write_text(json.dumps(config))
    save_sharded(target, weights, num_shards)
    return target


def test_every_parameter_equals_transformers_own_loading(tiny_k25: Path) -> None:
    theirs = Kimi_K25ForConditionalGeneration.from_pretrained(tiny_k25, dtype=torch.float32).state_dict()
    ours = load_language_model(Checkpoint(tiny_k25), device=CPU, dtype=torch.float32).state_dict()
    renamed = {name.replace("model.", "model.language_model.", 1): weight for name, weight in ours.items()}
    language = {name for name in theirs if "vision_tower" not in name and "mm_projector" not in name}
    assert renamed.keys() == language
    for name, weight in renamed.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_the_dtype_and_the_router_stays_in_fp32(tiny_vl: Path, dtype: torch.dtype) -> None:
    model = load_language_model(Checkpoint(tiny_vl), device=CPU, dtype=dtype)
    for name, weight in model.state_dict().items():
        assert weight.dtype == (torch.float32 if ".mlp.gate." in name else dtype), name
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_progress_is_reported_to_the_end(tiny_vl: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_language_model(
        Checkpoint(tiny_vl), device=CPU, dtype=torch.float32, progress=lambda done, total: seen.append((done, total))
    )
    total = len(language_tensors(CheckpointConfig.from_checkpoint(tiny_vl).text))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_stored_rotary_tables_are_skipped(tiny_vl: Path, tmp_path: Path) -> None:
    weights = stored(tiny_vl) | {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}
    load_language_model(Checkpoint(rewrite(tiny_vl, tmp_path / "c", weights)), device=CPU, dtype=torch.float32)


def test_tied_embeddings_need_no_head(tiny_vl: Path, tmp_path: Path) -> None:
    weights = stored(tiny_vl)
    del weights["language_model.lm_head.weight"]
    folder = rewrite(tiny_vl, tmp_path / "c", weights, tie_word_embeddings=True)
    model = load_language_model(Checkpoint(folder), device=CPU, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def quantized(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights with packed experts, and the same weights as plain bf16."""
    generator = torch.Generator().manual_seed(0)
    packed, plain = stored(folder), stored(folder)
    for name in [name for name in packed if ".mlp.experts." in name]:
        rows, columns = packed.pop(name).shape
        values = torch.randint(-8, 8, (rows, columns), generator=generator)
        scale = (0.01 + 0.01 * torch.rand(rows, columns // 32, generator=generator)).bfloat16()
        packed[f"{name}_packed"] = pack(values)
        packed[f"{name}_scale"] = scale
        packed[f"{name}_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
        plain[name] = (values.float() * scale.float().repeat_interleave(32, dim=1)).float()
    return packed, plain


@pytest.mark.parametrize("num_shards", [1, 7])
def test_j2_packed_experts_equal_plain_ones(tiny_k25: Path, tmp_path: Path, num_shards: int) -> None:
    packed, plain = quantized(tiny_k25)
    # A shuffled order lets the parts of one weight lie in different shards.
    names = sorted(packed, key=lambda name: hash_of(name))
    shuffled = {name: packed[name] for name in names}
    first = rewrite(tiny_k25, tmp_path / "packed", shuffled, num_shards, quantization_config=QUANTIZATION)
    second = rewrite(tiny_k25, tmp_path / "plain", plain)
    ours = load_language_model(Checkpoint(first), device=CPU, dtype=torch.float32).state_dict()
    expected = load_language_model(Checkpoint(second), device=CPU, dtype=torch.float32).state_dict()
    for name, weight in ours.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "fp8"}, "'fp8'"),
        ({"format": "float-quantized"}, "'float-quantized'"),
        ({"quant_method": "awq", "format": None}, "'awq'"),
    ],
)
def test_j2_other_quantizations_are_refused_by_name(
    tiny_k25: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = rewrite(tiny_k25, tmp_path / "c", stored(tiny_k25), quantization_config=QUANTIZATION | change)
    with pytest.raises(ConfigError, match=message):
        Checkpoint(folder)


def test_experts_that_were_never_written_are_named() -> None:
    experts = ExpertWeights(2, CPU, torch.float32)
    assert not experts.take("model.layers.1.mlp.gate.weight", torch.ones(2, 4))
    assert not experts.take("model.layers.1.mlp.shared_experts.up_proj.weight", torch.ones(2, 4))
    for proj in ("gate", "up"):
        assert experts.take(f"model.layers.1.mlp.experts.0.{proj}_proj.weight", torch.ones(3, 4))
    with pytest.raises(ConfigError, match="gate_up_proj got 2 expert matrices, expected 4"):
        experts.check_complete()


def test_a_packed_weight_without_its_scale_is_named() -> None:
    experts = ExpertWeights(1, CPU, torch.float32)
    assert experts.take("model.layers.1.mlp.experts.0.up_proj.weight_packed", torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"experts.0.up_proj has only weight_packed"):
        experts.check_complete()


def test_gate_rows_come_first() -> None:
    experts = ExpertWeights(1, CPU, torch.float32)
    experts.take("l.mlp.experts.0.up_proj.weight", torch.full((3, 4), 2.0))
    experts.take("l.mlp.experts.0.gate_proj.weight", torch.full((3, 4), 1.0))
    assert experts.fused["l.mlp.experts.gate_up_proj"][0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_a_stored_tensor_no_parameter_wants_is_refused(tiny_vl: Path, tmp_path: Path) -> None:
    folder = rewrite(tiny_vl, tmp_path / "c", stored(tiny_vl))
    checkpoint = Checkpoint(folder)
    extra = folder / "extra.safetensors"
    save_file({"language_model.model.extra": torch.ones(1)}, extra)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["language_model.model.extra"] = extra.name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"unexpected tensors: language_model\.model\.extra"):
        Checkpoint(folder)
    checkpoint.tensors["language_model.model.extra"] = type(next(iter(checkpoint.tensors.values())))(extra, "F32", (1,))
    with pytest.raises(ConfigError, match=r"Unexpected key.*model.extra"):
        load_language_model(checkpoint, device=CPU, dtype=torch.float32)


def hash_of(name: str) -> int:
    return sum(ord(character) * 31**index for index, character in enumerate(name)) % 10007
