# SPDX-License-Identifier: Apache-2.0
"""Sampling against distributions computed by hand, and its independence of neighbours."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kimi_triton.llm.sampling import TokenSampler, sample
from kimi_triton.text.options import GenerationOptions
from tests.llm.scripted import greedy

VOCAB = 12
NOTHING_BLOCKED = torch.zeros(VOCAB, dtype=torch.bool)
PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05] + [0.0] * 7).double()
LOGITS = PROBS.log().clamp(min=-1e4).float()


def sampler(options: GenerationOptions, prompt: tuple[int, ...] = (11,)) -> TokenSampler:
    return TokenSampler(options, torch.tensor(prompt), VOCAB, torch.device("cpu"))


def drawn(samples: int = 4000, **options: object) -> dict[int, float]:
    """Frequencies of tokens over many draws of one request."""
    one = sampler(greedy(**({"temperature": 1.0, "seed": 0} | options)))
    results = sample(LOGITS.expand(samples, -1).clone(), NOTHING_BLOCKED, [one] * samples)
    counts = Counter(result.token_id for result in results)
    return {int(token or 0): count / samples for token, count in counts.items()}


def assert_close(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for token, frequency in expected.items():
        assert found[token] == pytest.approx(frequency, abs=0.03)


def normalised(weights: dict[int, float]) -> dict[int, float]:
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def test_draws_follow_the_distribution() -> None:
    assert_close(drawn(), {token: float(PROBS[token]) for token in range(5)})


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 2.0):
        expected = {token: float(PROBS[token]) ** (1 / temperature) for token in range(5)}
        assert_close(drawn(temperature=temperature), normalised(expected))


def test_top_k_keeps_the_likeliest() -> None:
    assert_close(drawn(top_k=2), normalised({0: 0.4, 1: 0.3}))
    assert drawn(samples=50, top_k=1) == {0: 1.0}


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.96, 5), (1.0, 5)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    assert drawn(samples=1000, top_p=top_p).keys() == set(range(kept))


def test_top_p_counts_over_what_top_k_left() -> None:
    # Of the first three, 0.4 / 0.85 = 0.47 and (0.4 + 0.3) / 0.85 = 0.82.
    assert drawn(samples=500, top_k=3, top_p=0.8).keys() == {0, 1}
    assert drawn(samples=500, top_k=3, top_p=0.83).keys() == {0, 1, 2}


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert drawn(samples=1000, min_p=0.3).keys() == {0, 1, 2}  # 0.3 * 0.4 = 0.12


def test_h4_zero_and_tiny_temperatures_take_the_likeliest_token() -> None:
    for temperature in (0.0, 1e-6, 1e-300):
        assert drawn(samples=20, temperature=temperature) == {0: 1.0}


def test_h4_a_greedy_row_next_to_sampled_ones_stays_greedy() -> None:
    flat = torch.zeros(3, VOCAB)
    flat[1, 7] = 0.1
    samplers = [sampler(greedy(temperature=1.0, seed=1)), sampler(greedy()), sampler(greedy(temperature=1.0, seed=2))]
    results = [[one.token_id for one in sample(flat, NOTHING_BLOCKED, samplers)] for _ in range(10)]
    assert {row[1] for row in results} == {7}
    assert len({row[0] for row in results}) > 3


def test_h5_the_same_seed_gives_the_same_tokens_alone_and_in_company() -> None:
    table = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0))
    chosen = [
        greedy(temperature=0.8, seed=42, top_p=0.9),
        greedy(temperature=1.5, seed=42),
        greedy(temperature=1.0, seed=0, top_k=3),
        greedy(temperature=1.0, seed=2**63 - 1, min_p=0.1, repetition_penalty=1.5),
    ]

    def run(which: list[int]) -> list[list[int | None]]:
        samplers = [sampler(chosen[index]) for index in which]
        steps = [
            sample(table[[(step + index) % 40 for index in which]], NOTHING_BLOCKED, samplers) for step in range(30)
        ]
        return [[step[row].token_id for step in steps] for row in range(len(which))]

    together = run([0, 1, 2, 3])
    assert [run([index])[0] for index in range(4)] == together
    assert run([3, 1])[0] == together[3]
    assert together[0] != together[1]


def test_h5_without_a_seed_two_requests_differ() -> None:
    samplers = [sampler(greedy(temperature=1.0)) for _ in range(2)]
    tokens = [[one.token_id for one in sample(torch.zeros(2, VOCAB), NOTHING_BLOCKED, samplers)] for _ in range(30)]
    assert [row[0] for row in tokens] != [row[1] for row in tokens]


def test_blocked_tokens_are_never_chosen() -> None:
    blocked = NOTHING_BLOCKED.clone()
    blocked[[0, 1]] = True
    for options in (greedy(), greedy(temperature=2.0, seed=0), greedy(temperature=2.0, seed=0, top_k=1)):
        tokens = {sample(LOGITS.unsqueeze(0), blocked, [sampler(options)])[0].token_id for _ in range(50)}
        assert not tokens & {0, 1}
    assert sample(LOGITS.unsqueeze(0), blocked, [sampler(greedy())])[0].token_id == 2


class Highest(TokenSampler):
    """Draws the largest number there is below 1."""

    def draw(self) -> float:
        return math.nextafter(1.0, 0.0)


def test_the_highest_number_picks_a_token_that_is_possible() -> None:
    highest = Highest(greedy(temperature=1.0), torch.tensor([1]), VOCAB, torch.device("cpu"))
    assert sample(LOGITS.unsqueeze(0), NOTHING_BLOCKED, [highest])[0].token_id == 4
    weights = torch.full((1, 200_000), -20.0)
    weights[0, 150_000:] = -math.inf
    blocked = torch.isinf(weights[0])
    highest = Highest(greedy(temperature=1.0), torch.tensor([1]), 200_000, torch.device("cpu"))
    chosen = sample(weights.nan_to_num(neginf=0.0), blocked, [highest])[0].token_id
    assert chosen == 149_999


def test_a_repetition_penalty_makes_prompt_and_answer_less_likely() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.05] + [-9.0] * 8])
    one = sampler(greedy(repetition_penalty=1.2), prompt=(0,))
    assert sample(logits, NOTHING_BLOCKED, [one])[0].token_id == 1  # 2.0 / 1.2 < 1.9
    assert sample(logits, NOTHING_BLOCKED, [one])[0].token_id == 0  # both are seen now
    negative = torch.tensor([[-1.0, -1.05] + [-9.0] * 10])
    assert sample(negative, NOTHING_BLOCKED, [sampler(greedy(repetition_penalty=1.2), prompt=(0,))])[0].token_id == 1


def test_log_probabilities_are_the_models_own() -> None:
    both = [sampler(greedy(logprobs=True)), sampler(greedy()), sampler(greedy(logprobs=True, temperature=0.01, seed=0))]
    results = sample(LOGITS.expand(3, -1).clone(), NOTHING_BLOCKED, both)
    assert results[0].logprob == pytest.approx(math.log(0.4), abs=1e-5)
    assert results[1].logprob is None
    assert results[2].logprob == pytest.approx(math.log(0.4), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_d1_a_row_that_is_not_finite_gives_no_token(bad: float, temperature: float) -> None:
    logits = LOGITS.expand(2, -1).clone()
    logits[0, 3] = bad
    options = greedy(temperature=temperature, seed=0, logprobs=True, repetition_penalty=1.1)
    broken, fine = sample(logits, NOTHING_BLOCKED, [sampler(options), sampler(options)])
    assert broken.token_id is None
    assert fine.token_id in range(5)
