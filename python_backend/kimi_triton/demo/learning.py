# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch, one step of Muon and AdamW, and the averaged weights that are shipped in the end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import Batch, Views
from kimi_triton.demo.hints import hint_loss, initial_readers, projector_rows
from kimi_triton.demo.trainable import (
    ROUTER_BIAS,
    Weights,
    filled_up,
    hidden_states,
    image_embeds,
    initial_weights,
    tower_states,
)

MUON_RATE, ADAMW_RATE = 2e-3, 1e-3
TOWER = "vision_tower."
PROJECTOR = "mm_projector.proj.0.weight"
OTHER_ROWS = 0.3  # what random rows of it are multiplied by
ENDS = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
WARM_UP = 100  # steps
COOL_DOWN = 0.42  # the last part of each phase, in which the learning rate falls to zero
EMA_DECAY = 0.99
EMA_EVERY = 5  # steps
ANSWERS_STEP = 128  # rows of answers are rounded up to a multiple of this, as all rows are (see trainable)


class Learner:
    """Weights, optimiser and average, in two phases: the vision tower learns what the hints say about pictures; then
    it is left as it is, and the projector and the language model learn to answer.

    A language model that grows up on what an unfinished tower shows never learns to look up what it is asked for; one
    that sees a finished tower does in minutes.
    """

    def __init__(self, config: CheckpointConfig, seed: int, tower_steps: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.config = config
        self.tower_steps, self.steps, self.step = tower_steps, steps, 0
        self.weights = initial_weights(config, seed)
        self.readers = initial_readers(config.vision.hidden_size)
        self.average = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._begin_phase()

    def see(self, views: Views) -> float:
        """One step of the first phase; returns the loss of the hints."""
        tower = tower_states(in_bfloat16(self.weights), self.config, views.pixel_values, views.grids)
        return self._learn(hint_loss(self.readers, tower, views.labels))

    def answer(self, batch: Batch) -> float:
        """One step of the second phase; returns the loss of the answers."""
        logits = answer_logits(in_bfloat16(self.weights), self.config, batch)
        losses = F.cross_entropy(logits.float(), batch.answer_ids, reduction="none")
        return self._learn((losses * batch.answer_weights).sum())

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "weights": self.weights,
            "readers": self.readers,
            "average": self.average,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        for name, weight in state["weights"].items():
            self.weights[name].copy_(weight)
            self.average[name].copy_(state["average"][name])
        self.readers.copy_(state["readers"])
        self._begin_phase()
        for optimiser, stored in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(stored)

    @property
    def is_seeing(self) -> bool:
        """Whether this is the first phase."""
        return self.step < self.tower_steps

    def _begin_phase(self) -> None:
        for name, weight in self.weights.items():
            weight.requires_grad_(name.startswith(TOWER) == self.is_seeing and not name.endswith(ROUTER_BIAS))
        trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        # Muon is made for hidden matrices; tables, norms, biases and the two ends of the model are left to AdamW.
        matrices = [weight for name, weight in trained.items() if weight.ndim == 2 and not name.endswith(ENDS)]
        others = [weight for name, weight in trained.items() if weight.ndim != 2 or name.endswith(ENDS)]
        others += [self.readers] if self.is_seeing else []
        self.parameters = matrices + others
        self.optimisers = (
            torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )

    def _learn(self, loss: Tensor) -> float:
        for optimiser, rate in zip(self.optimisers, (MUON_RATE, ADAMW_RATE), strict=True):
            optimiser.param_groups[0]["lr"] = rate * self._rate()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()  # type: ignore[no-untyped-call]
            optimiser.zero_grad()
        self.step += 1
        if self.step % EMA_EVERY == 0:
            self._update_average()
        if self.step == self.tower_steps:
            self._finish_tower()
        return loss.item()

    @torch.no_grad()
    def _finish_tower(self) -> None:
        """Keep the averaged tower, and let the projector see what the readers see and little else."""
        first = self.average[PROJECTOR]
        rows = projector_rows(self.readers)
        first.copy_(torch.cat([rows, OTHER_ROWS * first[len(rows) :]]))
        for name, weight in self.weights.items():
            weight.copy_(self.average[name])
        self._begin_phase()

    def _rate(self) -> float:
        first, last = (0, self.tower_steps) if self.is_seeing else (self.tower_steps, self.steps)
        left = (last - self.step) / (COOL_DOWN * (last - first))
        return max(0.0, min(1.0, left, (self.step - first + 1) / WARM_UP))

    @torch.no_grad()
    def _update_average(self) -> None:
        age = self.step - (self.tower_steps if self.step > self.tower_steps else 0)
        decay = min(EMA_DECAY, age / (age + 100))
        for name, average in self.average.items():
            average.lerp_(self.weights[name], 1 - decay)


def in_bfloat16(weights: Weights) -> Weights:
    """Copies to compute with; their gradients reach the fp32 originals."""
    return {name: weight if name.endswith(ROUTER_BIAS) else weight.bfloat16() for name, weight in weights.items()}


def answer_logits(weights: Weights, config: CheckpointConfig, batch: Batch) -> Tensor:
    """(answer tokens, vocab_size)"""
    tower = tower_states(weights, config, batch.views.pixel_values, batch.views.grids)
    embeds = image_embeds(weights, tower, batch.views.grids)
    rows = F.embedding(batch.input_ids, weights["language_model.model.embed_tokens.weight"])
    # image_embeds has more rows than there are image tokens; they come last, and no token is left for them.
    rows = rows.masked_scatter(batch.image_rows[:, None], embeds.to(rows.dtype))
    hidden = hidden_states(weights, config, rows, batch.lengths)
    answers = filled_up(hidden[batch.answer_rows], ANSWERS_STEP)
    return F.linear(answers, weights["language_model.lm_head.weight"])[: len(batch.answer_rows)]


@torch.no_grad()
def score(weights: Weights, config: CheckpointConfig, batch: Batch) -> list[list[bool]]:
    """For each answer, which of its tokens are the likeliest given the right ones before: all of them are exactly when
    greedy decoding gives the answer."""
    logits = answer_logits(in_bfloat16(weights), config, batch)
    right = torch.split(logits.argmax(-1) == batch.answer_ids, batch.answer_lengths)
    return [answer.tolist() for answer in right]
