# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, for all requests of a step at once and yet each on its own.

Every request draws one number per token from its own generator and looks it up in its own distribution, so neither its
neighbours nor their options can change what it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_triton.text.options import GenerationOptions

SMALLEST_TEMPERATURE = 1e-30  # differences of logits divided by this are 0 or -inf, never NaN


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_id` is None when the logits of the row were not finite."""

    token_id: int | None
    logprob: float | None


class TokenSampler:
    """The sampling state of one request: its options, its generator and the tokens it has seen."""

    def __init__(self, options: GenerationOptions, prompt_ids: Tensor, vocab_size: int, device: torch.device) -> None:
        self.options = options
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)
        self._seen: Tensor | None = None  # (vocab,) bool, only where it is needed
        if options.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[prompt_ids.to(device)] = True

    def penalize(self, logits: Tensor) -> None:
        """Make seen tokens less likely, in place: positive logits are divided, negative ones multiplied."""
        if self._seen is not None:
            penalty = self.options.repetition_penalty
            logits.copy_(torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))

    def draw(self) -> float:
        """Uniform in [0, 1)."""
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def note(self, token_id: int) -> None:
        if self._seen is not None:
            self._seen[token_id] = True


def sample(logits: Tensor, blocked: Tensor, samplers: Sequence[TokenSampler]) -> list[Sampled]:
    """One token for each row of logits (n, vocab) fp32; tokens where `blocked` (vocab,) is true are never chosen.

    The log-probability is the model's own, before temperature, penalty and `blocked`.
    """
    finite = torch.isfinite(logits).all(dim=-1)
    scores = torch.where(finite.unsqueeze(1), logits, 0).masked_fill_(blocked, -torch.inf)
    for row, sampler in enumerate(samplers):
        sampler.penalize(scores[row])
    tokens = scores.argmax(dim=-1)
    drawn = [row for row, sampler in enumerate(samplers) if sampler.options.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [samplers[row] for row in drawn])
    logprobs = _logprobs(logits, tokens, samplers)
    results = []
    for row, (token_id, is_finite) in enumerate(zip(tokens.tolist(), finite.tolist(), strict=True)):
        if is_finite:
            samplers[row].note(token_id)
        results.append(Sampled(token_id if is_finite else None, logprobs.get(row) if is_finite else None))
    return results


def _logprobs(logits: Tensor, tokens: Tensor, samplers: Sequence[TokenSampler]) -> dict[int, float]:
    rows = [row for row, sampler in enumerate(samplers) if sampler.options.logprobs]
    if not rows:
        return {}
    chosen = logits[rows].log_softmax(dim=-1).gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
    return dict(zip(rows, chosen.tolist(), strict=True))


def _draw(scores: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """(n, vocab) -> (n,): temperature first, then top_k, top_p and min_p, each over what the one before left."""
    options = [sampler.options for sampler in samplers]
    temperature = _column([max(option.temperature, SMALLEST_TEMPERATURE) for option in options], scores)
    probs = ((scores - scores.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    sorted_rows = [row for row, option in enumerate(options) if option.top_k > 0 or option.top_p < 1]
    if sorted_rows:
        probs[sorted_rows] = _keep_likeliest(probs[sorted_rows], [options[row] for row in sorted_rows])
    min_p = _column([option.min_p for option in options], probs)
    probs = torch.where(probs < min_p * probs.amax(dim=-1, keepdim=True), 0, probs)
    uniform = torch.tensor([sampler.draw() for sampler in samplers], dtype=torch.float64, device=probs.device)
    return _pick(probs, uniform)


def _keep_likeliest(probs: Tensor, options: Sequence[GenerationOptions]) -> Tensor:
    """Zero all but the top_k tokens, and of these all but the fewest that reach top_p of their sum."""
    if all(option.top_k for option in options):
        ordered, order = probs.topk(min(max(option.top_k for option in options), probs.shape[1]))
    else:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    top_k = _column([option.top_k or probs.shape[1] for option in options], probs)
    ordered = torch.where(torch.arange(ordered.shape[1], device=probs.device) < top_k, ordered, 0)
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    top_p = _column([option.top_p for option in options], cumulative)
    # A token stays when those before it do not reach top_p yet, so the first one always does. With top_p = 1 all stay.
    stays = (cumulative - ordered < top_p * cumulative[:, -1:]) | (top_p == 1)
    return torch.zeros_like(probs).scatter_(1, order, torch.where(stays, ordered, 0))


def _pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution, which need not sum to 1: the first token whose sum passes the number."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    found = torch.searchsorted(cumulative, uniform.unsqueeze(1) * total, right=True).squeeze(1)
    last_possible = (cumulative < total).sum(dim=-1)  # where rounding makes the product as large as the sum
    return torch.minimum(found, last_possible)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
