# SPDX-License-Identifier: Apache-2.0
"""The forward pass: against transformers, and the same for every way to cut and pack the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.llm.decoder import DeepseekDecoder
from kimi_triton.llm.language_model import load_language_model
from kimi_triton.llm.latent_cache import LatentCache, Segment

TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}
NUM_IDS = 300


@pytest.fixture(scope="module", params=["tiny_k25", "tiny_vl"])
def models(request: pytest.FixtureRequest) -> tuple[DeepseekDecoder, DeepseekV3ForCausalLM]:
    """Ours, and transformers' untouched model with the same weights."""
    folder: Path = request.getfixturevalue(request.param)
    model = load_language_model(Checkpoint(folder), device=torch.device("cpu"), dtype=torch.float32)
    oracle = DeepseekV3ForCausalLM(model.config)
    oracle.load_state_dict(model.state_dict())
    return DeepseekDecoder(model), oracle.eval()


def prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(NUM_IDS, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def test_logits_equal_transformers_at_every_position(models: tuple[DeepseekDecoder, DeepseekV3ForCausalLM]) -> None:
    decoder, oracle = models
    (ids,) = prompts(23)
    expected = oracle(input_ids=ids.unsqueeze(0)).logits[0]
    decoder.reserve(1, 23)
    rows = decoder.embed(ids)
    found = [decoder.forward(rows[:5], [Segment(0, 0, 5)], 0)]
    found += [decoder.forward(rows[at : at + 1], [Segment(0, at, 1)], 1) for at in range(5, 23)]
    torch.testing.assert_close(torch.cat(found), expected[4:], **TOLERANCE)
    decoder.clear(0, 23)


@torch.inference_mode()
def test_a_prompt_in_chunks_equals_a_prompt_in_one(models: tuple[DeepseekDecoder, DeepseekV3ForCausalLM]) -> None:
    decoder, oracle = models
    (ids,) = prompts(40)
    expected = oracle(input_ids=ids.unsqueeze(0)).logits[0, -1:]
    rows = decoder.embed(ids)
    for cuts in ([40], [1, 39], [13, 13, 14], [39, 1]):
        decoder.reserve(1, 40)
        start = 0
        for length in cuts:
            logits = decoder.forward(rows[start : start + length], [Segment(0, start, length)], 0)
            start += length
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        decoder.clear(0, 40)


@torch.inference_mode()
def test_packed_requests_equal_separate_ones(models: tuple[DeepseekDecoder, DeepseekV3ForCausalLM]) -> None:
    decoder, oracle = models
    all_ids = prompts(9, 31, 17, 300)
    expected = torch.cat([oracle(input_ids=ids.unsqueeze(0)).logits[0, -1:] for ids in all_ids])
    decoder.reserve(4, 300)
    rows = [decoder.embed(ids) for ids in all_ids]
    first = [Segment(row, 0, len(ids) - 1) for row, ids in enumerate(all_ids)]
    decoder.forward(torch.cat([part[:-1] for part in rows]), first, 0)
    # Now the last tokens: three decode together in an order that is no view of the cache, one is still a prompt.
    order = [2, 0, 3, 1]
    last = [Segment(row, len(all_ids[row]) - 1, 1) for row in order]
    logits = decoder.forward(torch.cat([rows[row][-1:] for row in order]), last, num_decode=3)
    torch.testing.assert_close(logits, expected[order], **TOLERANCE)
    for row, ids in enumerate(all_ids):
        decoder.clear(row, len(ids))


@torch.inference_mode()
def test_a_moved_row_goes_on_as_before(models: tuple[DeepseekDecoder, DeepseekV3ForCausalLM]) -> None:
    decoder, oracle = models
    (ids,) = prompts(12)
    expected = oracle(input_ids=ids.unsqueeze(0)).logits[0, -1:]
    decoder.reserve(3, 12)
    rows = decoder.embed(ids)
    decoder.forward(rows[:11], [Segment(2, 0, 11)], 0)
    decoder.move(2, 0, 11)
    decoder.clear(2, 11)
    decoder.reserve(5, 1000)
    torch.testing.assert_close(decoder.forward(rows[11:], [Segment(0, 11, 1)], 1), expected, **TOLERANCE)
    decoder.clear(0, 12)


@torch.inference_mode()
def test_a_row_of_nan_reaches_neither_neighbours_nor_successors(
    models: tuple[DeepseekDecoder, DeepseekV3ForCausalLM],
) -> None:
    decoder, oracle = models
    (ids,) = prompts(8)
    expected = oracle(input_ids=ids.unsqueeze(0)).logits[0, -1:]
    decoder.reserve(2, 30)
    rows, poison = decoder.embed(ids), torch.full((30, decoder.embed(ids).shape[1]), torch.nan)
    decoder.forward(torch.cat((rows[:7], poison[:29])), [Segment(0, 0, 7), Segment(1, 0, 29)], 0)
    both = decoder.forward(torch.cat((rows[7:], poison[29:])), [Segment(0, 7, 1), Segment(1, 29, 1)], 2)
    torch.testing.assert_close(both[:1], expected, **TOLERANCE)
    assert both[1].isnan().all()
    for row, length in ((0, 8), (1, 30)):
        decoder.clear(row, length)
    decoder.forward(torch.cat((rows[:7], decoder.embed(prompts(29)[0]))), [Segment(1, 0, 7), Segment(0, 0, 29)], 0)
    again = torch.cat((decoder.embed(prompts(30)[0][29:]), rows[7:]))
    logits = decoder.forward(again, [Segment(0, 29, 1), Segment(1, 7, 1)], 2)
    torch.testing.assert_close(logits[1:], expected, **TOLERANCE)
    for row, length in ((0, 30), (1, 8)):
        decoder.clear(row, length)


def test_the_cache_holds_one_latent_and_one_rotary_key_per_token(
    models: tuple[DeepseekDecoder, DeepseekV3ForCausalLM],
) -> None:
    decoder, oracle = models
    assert decoder.cache_bytes_per_token == oracle.config.num_hidden_layers * (512 + 64) * 4


def test_a_growing_cache_keeps_what_it_holds() -> None:
    cache = LatentCache(2, 4, torch.device("cpu"), torch.float32)
    cache.reserve(1, 3)
    cache.layer(1)[0, :3] = torch.arange(12.0).view(3, 4)
    cache.reserve(3, 300)
    cache.reserve(2, 10)
    assert torch.equal(cache.layer(1)[0, :3], torch.arange(12.0).view(3, 4))
    assert cache.layer(1)[1:].count_nonzero() == 0
    assert cache.layer(0).shape[0] == 3
    assert 300 <= cache.layer(0).shape[1] <= 600
