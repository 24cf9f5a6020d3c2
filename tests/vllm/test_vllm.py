# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine with a real vLLM server, against the language model in fp32.

vLLM computes in bf16 on CPUs, so its greedy choice may differ from ours where two tokens are nearly equal. Random
weights make such ties common. Hence each token is compared with the logits of our model after the same tokens: it
must be the likeliest, or nearly as likely.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.llm.assembly import vllm_step
from kimi_triton.llm.language_model import load_language_model
from kimi_triton.llm.step import LlmStep
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.llm.vllm_servers import VllmSettings
from kimi_triton.text.tokenizer import KimiTokenizer
from tests.llm.scripted import RecordingCaller, llm_request
from tests.vllm.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
GRID = (1, 4, 4)
NEARLY = 0.25  # nats; bf16 keeps eight bits, and logits of these models reach about 4
TIMEOUT_S = 120.0


class Prompt(NamedTuple):
    ids: list[int]
    embeds: Tensor
    grids: tuple[tuple[int, int, int], ...]


class Stage:
    """A step with the vLLM engine, and the model of transformers beside it."""

    def __init__(self, folder: Path, url: str) -> None:
        checkpoint = Checkpoint(folder)
        config = checkpoint.config
        self.media_id = config.media_placeholder_token_id
        self.roles = TokenRoles.from_checkpoint(folder, config, KimiTokenizer.from_checkpoint(folder, config))
        loaded = load_language_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
        self.oracle = DeepseekV3ForCausalLM(loaded.config)
        self.oracle.load_state_dict(loaded.state_dict())
        self.oracle.eval()
        self.step: LlmStep = vllm_step(checkpoint, (url,), VllmSettings(retry_after_s=0.1))
        self.step.start()

    def prompt(self, seed: int, num_images: int = 0, image_seed: int = 0) -> Prompt:
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = torch.randint(300, (5 + seed % 40,), generator=generator).tolist()
        for _ in range(num_images):
            ids += [self.media_id] * 4 + torch.randint(300, (3,), generator=generator).tolist()
        embeds = torch.randn(4 * num_images, 128, generator=torch.Generator().manual_seed(image_seed)).bfloat16()
        return Prompt(ids, embeds, (GRID,) * num_images)

    def submit(self, given: Prompt, **options: object) -> RecordingCaller:
        caller = RecordingCaller()
        self.step.submit(llm_request(given.ids, given.embeds, given.grids, **options), caller)  # type: ignore[arg-type]
        return caller

    @torch.no_grad()
    def logprobs(self, given: Prompt, answer: list[int]) -> Tensor:
        """(len(answer), vocab) of transformers, after the same tokens."""
        rows = self.oracle.model.embed_tokens(torch.tensor(given.ids + answer))
        rows[torch.tensor([*given.ids, *[-1] * len(answer)]) == self.media_id] = given.embeds.float()
        logits = self.oracle(inputs_embeds=rows.unsqueeze(0)).logits[0, len(given.ids) - 1 : -1]
        return logits.log_softmax(dim=-1)

    def check_greedy(self, given: Prompt, answer: list[int]) -> int:
        """Each token is nearly the likeliest one allowed; returns how many are exactly that."""
        logprobs = self.logprobs(given, answer)
        logprobs[:, sorted(self.roles.blocked)] = -torch.inf
        chosen = logprobs.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        lost = logprobs.amax(dim=-1) - chosen
        assert lost.max() < NEARLY, lost
        return int((lost == 0).sum())


@pytest.fixture(scope="module")
def stage(vllm_server: VllmProcess, checkpoint: Path) -> Iterator[Stage]:
    stage = Stage(checkpoint, vllm_server.url)
    yield stage
    stage.step.stop()


def ids_of(caller: RecordingCaller) -> list[int]:
    assert caller.done.wait(TIMEOUT_S)
    caller.wait()
    return [token_id for answer in caller.answers for token_id in answer.token_ids]


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_context_is_the_servers(stage: Stage) -> None:
    assert stage.step.engine.context_length == 1024


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_greedy_tokens_are_those_of_transformers(stage: Stage, num_images: int) -> None:
    exact = total = 0
    for seed in range(4):
        given = stage.prompt(seed, num_images)
        answer = ids_of(stage.submit(given, max_tokens=24, stream=bool(seed % 2)))
        exact += stage.check_greedy(given, answer)
        total += len(answer)
    assert exact > 0.9 * total


def test_32_requests_at_once_answer_their_own_prompts(stage: Stage) -> None:
    prompts = [stage.prompt(seed, seed % 3, image_seed=seed) for seed in range(32)]
    callers = [stage.submit(given, max_tokens=2 + seed % 11) for seed, given in enumerate(prompts)]
    for given, caller in zip(prompts, callers, strict=True):
        stage.check_greedy(given, ids_of(caller))


def test_f5_two_images_of_one_size_never_share_an_answer(stage: Stage) -> None:
    first, second = (stage.prompt(33, 1, image_seed=seed) for seed in (1, 2))  # a prompt of more than one cache block
    assert first.ids == second.ids
    answers = [ids_of(stage.submit(given, max_tokens=16)) for given in (first, second, first)]
    assert answers[0] == answers[2] != answers[1]
    stage.check_greedy(first, answers[0])
    stage.check_greedy(second, answers[1])


def test_log_probabilities_are_nearly_those_of_transformers(stage: Stage) -> None:
    given = stage.prompt(7)
    caller = stage.submit(given, max_tokens=12, logprobs=True)
    ids = ids_of(caller)
    expected = stage.logprobs(given, ids).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    assert caller.answers[-1].logprobs is not None
    torch.testing.assert_close(torch.tensor(caller.answers[-1].logprobs), expected, atol=NEARLY, rtol=0)


def test_sampling_repeats_with_a_seed_and_never_takes_a_blocked_token(stage: Stage) -> None:
    given = stage.prompt(3)
    hot = {"temperature": 2.0, "max_tokens": 200}
    first, again, other = (ids_of(stage.submit(given, seed=seed, **hot)) for seed in (1, 1, 2))
    assert first == again != other
    assert not stage.roles.blocked & {*first, *other}
    assert len(set(ids_of(stage.submit(given, seed=1, temperature=1.0, top_k=1, max_tokens=8)))) >= 1


def test_h1_a_stop_token_ends_the_answer_and_is_counted(stage: Stage) -> None:
    ends = [stage.submit(stage.prompt(seed), max_tokens=900, temperature=2.0, seed=seed) for seed in range(6)]
    stopped = [caller for caller in ends if ids_of(caller) and caller.answers[-1].finish_reason == "stop"]
    assert stopped
    for caller in stopped:
        assert ids_of(caller)[-1] in stage.roles.stop
        assert caller.answers[-1].completion_tokens == len(ids_of(caller))


def test_g4_cancelling_reaches_vllm(stage: Stage, vllm_server: VllmProcess) -> None:
    callers = [stage.submit(stage.prompt(seed), max_tokens=900, stream=True, temperature=0.3) for seed in range(4)]
    until(lambda: vllm_server.num_running() > 0)
    for caller in callers:
        caller.gone = True
    for caller in callers:
        caller.done.wait(TIMEOUT_S)
    until(lambda: vllm_server.num_running() == 0)


def test_200_callers_that_vanish_leave_nothing_in_vllm(stage: Stage, vllm_server: VllmProcess) -> None:
    for start in range(0, 200, 40):
        callers = [stage.submit(stage.prompt(seed), max_tokens=900, stream=True) for seed in range(start, start + 40)]
        time.sleep(0.05)
        for caller in callers:
            caller.gone = True
        for caller in callers:
            assert caller.done.wait(TIMEOUT_S)
    until(lambda: vllm_server.num_running() == 0)
    assert ids_of(stage.submit(stage.prompt(1), max_tokens=2))
