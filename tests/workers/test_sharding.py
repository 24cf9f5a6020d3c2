# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel shards, all ranks as threads of one process, against the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kimi_triton.config import VisionConfig
from kimi_triton.errors import ConfigError
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.layout import check_shards
from kimi_triton.vision.local import load_from_folder
from kimi_triton.vision.moonvit import VisionModel
from kimi_triton.workers.sharding import apply_tensor_parallel

GRIDS: list[Grid] = [(1, 2, 2), (1, 6, 10), (4, 4, 6)]


class ThreadSum:
    """all_reduce between threads: the last one to come adds up, all take the sum."""

    def __init__(self, num_ranks: int) -> None:
        self._parts: list[Tensor] = []
        self._barrier = threading.Barrier(num_ranks)
        self._lock = threading.Lock()

    def __call__(self, tensor: Tensor) -> None:
        with self._lock:
            self._parts.append(tensor.clone())
        self._barrier.wait(30)
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait(30)
        tensor.copy_(total)
        with self._lock:
            self._parts.clear()
        self._barrier.wait(30)


@pytest.fixture(scope="module")
def model(tiny_k25: Path) -> VisionModel:
    return load_from_folder(tiny_k25, torch.device("cpu"), "float32", lambda _done, _total: None)


def pixels() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (sum(map(num_patches, GRIDS)), 3, 14, 14), dtype=torch.uint8, generator=generator)


def shards(model: VisionModel, tp_size: int, all_reduce: Callable[[Tensor], None]) -> list[VisionModel]:
    ranks = [deepcopy(model) for _ in range(tp_size)]
    for rank, shard in enumerate(ranks):
        apply_tensor_parallel(shard, rank, tp_size, all_reduce)
    return ranks


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_e2_shards_together_equal_the_whole_model(model: VisionModel, tp_size: int) -> None:
    ranks = shards(model, tp_size, ThreadSum(tp_size))
    with ThreadPoolExecutor(tp_size) as threads, torch.inference_mode():
        results = list(threads.map(lambda rank: rank(pixels(), GRIDS), ranks))
        expected = model(pixels(), GRIDS)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_a_shard_keeps_its_part_of_the_split_layers_and_owns_it(model: VisionModel) -> None:
    shard = shards(model, 4, lambda _: None)[3]
    whole, part = model.vision_tower.encoder.blocks[0], shard.vision_tower.encoder.blocks[0]
    sizes = {name: weight.numel() for name, weight in whole.named_parameters()}
    kept = {name.replace("product.", ""): weight for name, weight in part.named_parameters()}
    for name in ("wqkv.weight", "wqkv.bias", "wo.weight", "mlp.fc0.weight", "mlp.fc0.bias", "mlp.fc1.weight"):
        assert kept[name].numel() == sizes[name] // 4, name
        assert kept[name].untyped_storage().nbytes() == kept[name].nbytes, name
    for name in ("wo.bias", "mlp.fc1.bias", "norm0.weight"):
        assert kept[name].numel() == sizes[name], name


def test_the_bias_of_a_row_split_layer_is_added_once(model: VisionModel) -> None:
    shard = shards(model, 2, lambda _: None)[0].vision_tower.encoder.blocks[0].wo
    nothing = torch.zeros(1, model.config.hidden_size // 2)
    assert torch.equal(shard(nothing)[0], model.vision_tower.encoder.blocks[0].wo.bias)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_e2_the_released_sizes_divide_over_powers_of_two(tp_size: int) -> None:
    check_shards(released_sizes(), tp_size)


@pytest.mark.parametrize("tp_size", [3, 5, 32])
def test_e2_other_sizes_are_refused_with_both_numbers(tp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"16 attention heads .* {tp_size} tensor workers"):
        check_shards(released_sizes(), tp_size)


def released_sizes() -> VisionConfig:
    return VisionConfig(
        family="kimi_vl",
        hidden_size=1152,
        num_hidden_layers=27,
        num_attention_heads=16,
        intermediate_size=4304,
        pos_emb_height=64,
        pos_emb_width=64,
        pos_emb_time=1,
        text_hidden_size=2048,
    )
