# SPDX-License-Identifier: Apache-2.0
"""Packs in recordings of a larger size, with a stand-in for CUDA graphs and an attention that reads cu_seqlens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kimi_triton.vision.attention import Sequences, sdpa_attention
from kimi_triton.vision.graphs import MAX_IMAGES, GraphedEncoder
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.local import load_from_folder
from kimi_triton.vision.moonvit import VisionModel

PACKS: list[list[Grid]] = [
    [(1, 2, 2)],
    [(1, 4, 4), (1, 2, 6), (4, 2, 2)],
    [(1, 8, 8)],  # fills the smallest recording
    [(1, 8, 10), (1, 2, 2)],
    [(1, 2, 2)] * MAX_IMAGES,
    [(1, 2, 2)],  # again, after larger ones left their rows behind
]


class Replays:
    """Records by remembering what to compute; the result stays in place, as that of a graph does."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, layers: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = layers().clone()

        def replay() -> None:
            self.sizes.append(len(result))
            result.copy_(layers())

        return replay, result


def varlen_by_cu_seqlens(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """What a varlen kernel does: it knows cu_seqlens and nothing of the list of lengths."""
    ends = sequences.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    assert max(lengths) <= sequences.max_seqlen
    own = Sequences([length for length in lengths if length], sequences.cu_seqlens, sequences.max_seqlen)
    return sdpa_attention(query, key, value, own)


@pytest.fixture(scope="module")
def model(tiny_k25: Path) -> VisionModel:
    loaded = load_from_folder(tiny_k25, torch.device("cpu"), "float32", lambda _done, _total: None)
    for block in loaded.vision_tower.encoder.blocks:
        block.attention = varlen_by_cu_seqlens
    return loaded


def hidden_states(grids: list[Grid], width: int) -> Tensor:
    return torch.randn(sum(map(num_patches, grids)), width, generator=torch.Generator().manual_seed(len(grids)))


@torch.inference_mode()
def test_replayed_packs_equal_eager_ones(model: VisionModel) -> None:
    eager, replays = model.vision_tower.encoder, Replays()
    graphed = GraphedEncoder(eager, [64, 128], replays)
    graphed.record_all(torch.zeros(1, model.config.hidden_size))
    for grids in PACKS:
        given = hidden_states(grids, model.config.hidden_size)
        torch.testing.assert_close(graphed(given.clone(), grids), eager(given.clone(), grids), rtol=1e-5, atol=1e-5)
    assert replays.sizes == [64, 64, 64, 128, 64, 64]


@torch.inference_mode()
def test_packs_that_are_too_large_or_too_many_run_as_they_are(model: VisionModel) -> None:
    eager, replays = model.vision_tower.encoder, Replays()
    graphed = GraphedEncoder(eager, [64], replays)
    graphed.record_all(torch.zeros(1, model.config.hidden_size))
    for grids in ([(1, 8, 10)], [(1, 2, 2)] * (MAX_IMAGES + 1)):
        given = hidden_states(grids, model.config.hidden_size)
        assert torch.equal(graphed(given.clone(), grids), eager(given.clone(), grids))
    assert replays.sizes == []
