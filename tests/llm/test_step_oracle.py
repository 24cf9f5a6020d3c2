# SPDX-License-Identifier: Apache-2.0
"""Answers of the whole step against `generate` of transformers, alone and in a crowd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, Kimi_K25ForConditionalGeneration

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.llm.assembly import transformers_step
from kimi_triton.llm.language_model import load_language_model
from kimi_triton.llm.scheduler import EngineLimits
from kimi_triton.llm.step import LlmStep
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.text.tokenizer import KimiTokenizer
from tests.llm.scripted import RecordingCaller, llm_request

CPU = torch.device("cpu")
GRID = (1, 4, 4)


class Models(NamedTuple):
    step: LlmStep
    oracle: DeepseekV3ForCausalLM
    roles: TokenRoles
    media_id: int


@pytest.fixture(scope="module", params=["tiny_k25", "tiny_vl"])
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    folder: Path = request.getfixturevalue(request.param)
    checkpoint = Checkpoint(folder)
    # Small limits: requests wait for each other, long prompts are cut, rows move.
    limits = EngineLimits(max_running=6, max_waiting=100, prefill_tokens=24)
    step = transformers_step(checkpoint, device=CPU, limits=limits)
    loaded = load_language_model(checkpoint, device=CPU, dtype=torch.float32)
    oracle = DeepseekV3ForCausalLM(loaded.config)
    oracle.load_state_dict(loaded.state_dict())
    tokenizer = KimiTokenizer.from_checkpoint(folder, checkpoint.config)
    roles = TokenRoles.from_checkpoint(folder, checkpoint.config, tokenizer)
    step.start()
    yield Models(step, oracle.eval(), roles, checkpoint.config.media_placeholder_token_id)
    step.stop()


class Prompt(NamedTuple):
    ids: list[int]
    embeds: Tensor
    grids: tuple[tuple[int, int, int], ...]


def prompt(seed: int, media_id: int, num_images: int = 0, image_seed: int = 0) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 60, (), generator=generator))
    ids: list[int] = torch.randint(300, (length,), generator=generator).tolist()
    for _ in range(num_images):
        ids += [media_id] * 4 + torch.randint(300, (3,), generator=generator).tolist()
    embeds = torch.randn(4 * num_images, 128, generator=torch.Generator().manual_seed(image_seed)).bfloat16()
    return Prompt(ids, embeds, (GRID,) * num_images)


def oracle_ids(models: Models, given: Prompt, max_tokens: int) -> list[int]:
    """Greedy tokens of transformers' own generate, with embeddings merged by hand."""
    rows = models.oracle.model.embed_tokens(torch.tensor(given.ids)).clone()
    for place, row in zip(
        (at for at, one in enumerate(given.ids) if one == models.media_id), given.embeds, strict=True
    ):
        rows[place] = row.float()
    generated = models.oracle.generate(
        inputs_embeds=rows.unsqueeze(0),
        attention_mask=torch.ones(1, len(given.ids), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=sorted(models.roles.stop),
        suppress_tokens=sorted(models.roles.blocked),
        pad_token_id=0,
    )
    return generated[0].tolist()  # type: ignore[no-any-return]


def submit(models: Models, given: Prompt, **options: object) -> RecordingCaller:
    caller = RecordingCaller()
    models.step.submit(llm_request(given.ids, given.embeds, given.grids, **options), caller)  # type: ignore[arg-type]
    return caller


def ids_of(caller: RecordingCaller) -> list[int]:
    caller.wait()
    return [token_id for answer in caller.answers for token_id in answer.token_ids]


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_greedy_tokens_equal_transformers_generate(models: Models, num_images: int) -> None:
    for seed in range(2):
        given = prompt(seed, models.media_id, num_images)
        assert ids_of(submit(models, given, max_tokens=20)) == oracle_ids(models, given, 20)


def test_64_mixed_requests_at_once_equal_their_own_serial_answers(models: Models) -> None:
    requests = []
    for index in range(64):
        options: dict[str, object] = {"max_tokens": 2 + index % 11, "stream": index % 3 == 0}
        if index % 4 == 3:
            options |= {"temperature": 0.9, "seed": index, "top_p": 0.95, "top_k": 50 * (index % 8)}
        requests.append((prompt(index, models.media_id, num_images=index % 3, image_seed=index), options))
    serial = [ids_of(submit(models, given, **options)) for given, options in requests]
    callers = [submit(models, given, **options) for given, options in requests]
    assert [ids_of(caller) for caller in callers] == serial
    for index in (0, 1, 2, 22, 61):
        assert serial[index] == oracle_ids(models, requests[index][0], 2 + index % 11)
    assert len({tuple(ids) for ids in serial}) > 50


def test_f5_two_images_of_one_size_never_share_an_answer(models: Models) -> None:
    first, second = (prompt(5, models.media_id, 1, image_seed=seed) for seed in (1, 2))
    assert first.ids == second.ids
    expected = [oracle_ids(models, given, 16) for given in (first, second)]
    assert expected[0] != expected[1]
    for given, ids in ((first, 0), (second, 1), (first, 0)):
        assert ids_of(submit(models, given, max_tokens=16)) == expected[ids]
    together = [submit(models, given, max_tokens=16) for given in (first, second) * 3]
    assert [ids_of(caller) for caller in together] == expected * 3


def test_log_probabilities_equal_transformers(models: Models) -> None:
    given = prompt(7, models.media_id)
    caller = submit(models, given, max_tokens=6, logprobs=True)
    ids = ids_of(caller)
    logits = models.oracle(input_ids=torch.tensor([given.ids + ids])).logits[0, len(given.ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(caller.answers[-1].logprobs), expected.detach(), atol=1e-4, rtol=1e-4)


def test_a_decode_in_bf16_answers_too(tiny_k25: Path) -> None:
    step = transformers_step(Checkpoint(tiny_k25), device=CPU, dtype=torch.bfloat16)
    step.start()
    caller = RecordingCaller()
    step.submit(llm_request([1, 2, 3], torch.zeros(0, 128), max_tokens=8), caller)
    assert caller.wait().completion_tokens >= 1
    step.stop()


@torch.inference_mode()
def test_answers_equal_the_whole_k25_model_of_transformers(tiny_k25: Path) -> None:
    checkpoint = Checkpoint(tiny_k25)
    media_id = checkpoint.config.media_placeholder_token_id
    whole = Kimi_K25ForConditionalGeneration.from_pretrained(tiny_k25, dtype=torch.float32).eval()
    tokenizer = KimiTokenizer.from_checkpoint(tiny_k25, checkpoint.config)
    roles = TokenRoles.from_checkpoint(tiny_k25, checkpoint.config, tokenizer)
    step = transformers_step(checkpoint, device=CPU)
    step.start()
    for grids in ([(1, 4, 6)], [(1, 2, 2), (1, 8, 4), (1, 4, 4)]):
        grid = torch.tensor(grids)
        pixels = torch.randn(int(grid.prod(-1).sum()), 3, 14, 14, generator=torch.Generator().manual_seed(0))
        ids = tokenizer.encode("Look: ")
        for _, height, width in grids:
            ids += [media_id] * (height * width // 4) + tokenizer.encode("\n")
        expected = whole.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            pixel_values=pixels,
            image_grid_thw=grid,
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=sorted(roles.stop),
            suppress_tokens=sorted(roles.blocked),
            pad_token_id=0,
        )[0, len(ids) :].tolist()
        embeds = torch.cat(whole.model.get_image_features(pixels, grid, return_dict=True).pooler_output)
        caller = RecordingCaller()
        step.submit(llm_request(ids, embeds, grids, max_tokens=32), caller)
        assert ids_of(caller) == expected
    step.stop()


def test_a_context_longer_than_the_checkpoint_allows_is_refused(tiny_k25: Path) -> None:
    with pytest.raises(ConfigError, match="context length is 99999, the checkpoint allows 2 to 16384"):
        transformers_step(Checkpoint(tiny_k25), device=CPU, context_length=99999)
