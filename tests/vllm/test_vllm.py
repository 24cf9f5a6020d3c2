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

import pytest
import torch

from tests.vllm.stage import NEARLY, TIMEOUT_S, Stage, ids_of
from tests.vllm.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stage(vllm_server: VllmProcess, checkpoint: Path) -> Iterator[Stage]:
    stage = Stage(checkpoint, vllm_server.url)
    yield stage
    stage.step.stop()


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
