# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch, one step of Muon and AdamW, and the averaged weights that are shipped in the end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import IGNORED, NUM_COLOURS, NUM_KINDS, NUM_PLACES, Batch
from kimi_triton.demo.trainable import ROUTER_BIAS, Weights, filled_up, hidden_states, image_embeds, initial_weights

MUON_RATE, ADAMW_RATE = 2e-3, 1e-3
TOWER = "vision_tower."
ENDS = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
WARM_UP = 100  # steps
COOL_DOWN = 0.42  # the last part of each phase, in which the learning rate falls to zero
TOWER_SHARE = 0.4788  # of all steps: the phase in which everything learns. Then the vision tower is left as it is
HINTS = 0.3  # weight of the hints beside the answer
EMPTY = 0.05  # weight of a patch without anything in the hints: nearly all are
EMA_DECAY = 0.99
EMA_EVERY = 5  # steps
ANSWERS_STEP = 128  # rows of answers are rounded up to a multiple of this, as all rows are (see trainable)


class Learner:
    """Weights, optimiser and average. `hints` are linear readers of the vision tower that only training has.

    They are told which digit or shape has its centre in a patch, and where in the number it stands: a picture brings
    hundreds of such labels, its answer only a few tokens. Without them reading freely placed digits takes hours.
    """

    def __init__(self, config: CheckpointConfig, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.config, self.seed = config, seed
        self.tower_steps = int(TOWER_SHARE * steps)
        self.steps = steps
        self.step = 0
        self.weights = initial_weights(config, seed)
        width = config.vision.hidden_size
        self.hints = [torch.zeros(size, width).requires_grad_() for size in (NUM_KINDS, NUM_PLACES, NUM_COLOURS)]
        trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        # Muon is made for hidden matrices; tables, norms, biases and the two ends of the model are left to AdamW.
        matrices = [weight for name, weight in trained.items() if weight.ndim == 2 and not name.endswith(ENDS)]
        others = [weight for name, weight in trained.items() if weight.ndim != 2 or name.endswith(ENDS)] + self.hints
        self.parameters = matrices + others
        self.optimisers = (
            torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )
        self.average = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def learn(self, batch: Batch) -> tuple[float, float]:
        """One step; returns the loss of the answers and of the hints."""
        if self.step == self.tower_steps:
            self._finish_tower()
        for optimiser, rate in zip(self.optimisers, (MUON_RATE, ADAMW_RATE), strict=True):
            optimiser.param_groups[0]["lr"] = rate * self._rate()
        logits, tower = answer_logits(in_bfloat16(self.weights), self.config, batch)
        hints = self._hint_loss(tower, batch.patch_labels) if self.step < self.tower_steps else torch.zeros(())
        loss = F.cross_entropy(logits.float(), batch.answer_ids)
        (loss + HINTS * hints).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()  # type: ignore[no-untyped-call]
            optimiser.zero_grad()
        self.step += 1
        if self.step % EMA_EVERY == 0:
            self._update_average()
        return loss.item(), hints.item()

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "weights": self.weights,
            "hints": self.hints,
            "average": self.average,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        for name, weight in state["weights"].items():
            self.weights[name].copy_(weight)
            self.average[name].copy_(state["average"][name])
        for own, saved in zip(self.hints, state["hints"], strict=True):
            own.copy_(saved)
        for optimiser, stored in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(stored)
        if self.step > self.tower_steps:
            self._freeze_tower()

    @torch.no_grad()
    def _finish_tower(self) -> None:
        """Keep the averaged tower, and begin anew with the rest: a language model that grew up on what an unfinished
        tower shows never learns to look up what it is asked for; one that sees a finished tower does in minutes."""
        fresh = initial_weights(self.config, self.seed)
        for name, weight in self.weights.items():
            weight.copy_((self.average if name.startswith(TOWER) else fresh)[name])
            self.average[name].copy_(weight)
        for optimiser in self.optimisers:
            optimiser.state.clear()
        self._freeze_tower()

    def _freeze_tower(self) -> None:
        for name, weight in self.weights.items():
            if name.startswith(TOWER):
                weight.requires_grad_(False)

    def _rate(self) -> float:
        first, last = (0, self.tower_steps) if self.step < self.tower_steps else (self.tower_steps, self.steps)
        left = (last - self.step) / (COOL_DOWN * (last - first))
        return max(0.0, min(1.0, left, (self.step - first + 1) / WARM_UP))

    @torch.no_grad()
    def _update_average(self) -> None:
        age = self.step - (self.tower_steps if self.step > self.tower_steps else 0)
        decay = min(EMA_DECAY, age / (age + 100))
        for name, average in self.average.items():
            average.lerp_(self.weights[name], 1 - decay)

    def _hint_loss(self, tower: Tensor, labels: Tensor) -> Tensor:
        kinds, places, colours = (F.linear(tower, hint.to(tower.dtype)).float() for hint in self.hints)
        labels = F.pad(labels, (0, 0, 0, len(tower) - len(labels)), value=IGNORED)
        rarity = torch.ones(NUM_KINDS)
        rarity[0] = EMPTY
        loss = F.cross_entropy(kinds, labels[:, 0], weight=rarity)
        for logits, wanted in ((places, labels[:, 1]), (colours, labels[:, 2])):
            if bool((wanted != IGNORED).any()):
                loss = loss + F.cross_entropy(logits, wanted, ignore_index=IGNORED)
        return loss


def in_bfloat16(weights: Weights) -> Weights:
    """Copies to compute with; their gradients reach the fp32 originals."""
    return {name: weight if name.endswith(ROUTER_BIAS) else weight.bfloat16() for name, weight in weights.items()}


def answer_logits(weights: Weights, config: CheckpointConfig, batch: Batch) -> tuple[Tensor, Tensor]:
    """(answer tokens, vocab_size) logits, and the vision tower's last hidden states."""
    embeds, tower = image_embeds(weights, config, batch.pixel_values, batch.grids)
    rows = F.embedding(batch.input_ids, weights["language_model.model.embed_tokens.weight"])
    # Rows of pages come last in image_embeds, and no token is left for them.
    rows = rows.masked_scatter(batch.image_rows[:, None], embeds.to(rows.dtype))
    hidden = hidden_states(weights, config, rows, batch.lengths)
    answers = filled_up(hidden[batch.answer_rows], ANSWERS_STEP)
    logits = F.linear(answers, weights["language_model.lm_head.weight"])
    return logits[: len(batch.answer_rows)], tower


@torch.no_grad()
def score(weights: Weights, config: CheckpointConfig, batch: Batch) -> list[list[bool]]:
    """For each answer, which of its tokens are the likeliest given the right ones before: all of them are exactly when
    greedy decoding gives the answer."""
    logits, _ = answer_logits(in_bfloat16(weights), config, batch)
    right = torch.split(logits.argmax(-1) == batch.answer_ids, batch.answer_lengths)
    return [answer.tolist() for answer in right]
