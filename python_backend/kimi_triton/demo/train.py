# SPDX-License-Identifier: Apache-2.0
"""Train the demo model: `python -m kimi_triton.demo.train FOLDER` writes a checkpoint and its accuracy.

The state is saved to FOLDER/training.pt every few hundred steps; the same command goes on from there.

The shipped weights did not come out of one run of it. Their tower saw 8,800 batches with all hints at equal weight,
2,000 as they weigh now and 3,000 with more warp; the language model learned beside the last of these for 3,450 steps,
then on the finished tower for 4,850, the last 3,000 of them with more of the hard questions about scenes, and for 1,150
more with fewer numbers and the rate begun anew at two fifths. Nobody has run all steps in one; by 0.2 to 0.35 s a step
on two cores they take 70 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import Batch, Views, make_batch, make_views
from kimi_triton.demo.curriculum import exercises, pictures
from kimi_triton.demo.exam import held_out_exercises
from kimi_triton.demo.hints import right_hints
from kimi_triton.demo.learning import Learner, in_bfloat16, score
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.questions import Exercise
from kimi_triton.demo.tiny import save_sharded
from kimi_triton.demo.trainable import ROUTER_BIAS, Weights, tower_states
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.text.tokenizer import KimiTokenizer

STEPS, TOWER_SHARE = 16_000, 0.65
THINKING_SHARE = 0.4
EXAM_BATCH = 16  # exercises or pictures
SAVE_EVERY = 250  # steps


class Lessons(Dataset[Views | Batch]):
    """Batch number i, always the same for a seed."""

    def __init__(self, folder: Path, seed: int, first: int, steps: int, tower_steps: int) -> None:
        self.seed, self.first, self.steps, self.tower_steps = seed, first, steps, tower_steps
        self.tokenizer = KimiTokenizer.from_checkpoint(folder, CheckpointConfig.from_checkpoint(folder))
        self.settings = ImageSettings.from_checkpoint(folder, "kimi_k25")

    def __len__(self) -> int:
        return self.steps - self.first

    def __getitem__(self, index: int) -> Views | Batch:
        step = self.first + index
        rng = random.Random(f"{self.seed} {step}")
        if step < self.tower_steps:
            return make_views(pictures(step, rng), self.settings)
        asked = exercises(step - self.tower_steps, rng)
        return self.batch(asked, [rng.random() < THINKING_SHARE for _ in asked])

    def batch(self, asked: Sequence[Exercise], thinking: Sequence[bool]) -> Batch:
        return make_batch(asked, thinking, self.tokenizer, self.settings)


def accuracy(weights: Weights, lessons: Lessons, config: CheckpointConfig, count: int) -> dict[str, float]:
    """Shares of held-out answers that greedy decoding gets right; `digits` counts single tokens of numbers."""
    right: dict[str, list[bool]] = defaultdict(list)
    asked = held_out_exercises(count)
    for start in range(0, count, EXAM_BATCH):
        part = asked[start : start + EXAM_BATCH]
        batch = lessons.batch(part, [index % 2 == 0 for index in range(len(part))])
        for exercise, tokens in zip(part, score(weights, config, batch), strict=True):
            right[exercise.kind].append(all(tokens))
            if exercise.kind == "numbers":
                right["digits"] += tokens[-1 - len(exercise.answer) : -1]
    return {name: round(sum(values) / len(values), 4) for name, values in sorted(right.items())}


@torch.no_grad()
def hint_accuracy(learner: Learner, lessons: Lessons, count: int) -> dict[str, float]:
    """Shares of the hints about held-out pictures that the averaged tower gets right with the readers as they are."""
    shown = [picture for exercise in held_out_exercises(count) for picture in exercise.pictures]
    weights = in_bfloat16(learner.average)
    right: dict[str, list[Tensor]] = defaultdict(list)
    for start in range(0, len(shown), EXAM_BATCH):
        views = make_views(shown[start : start + EXAM_BATCH], lessons.settings)
        tower = tower_states(weights, learner.config, views.pixel_values, views.grids)
        for name, found in right_hints(learner.readers, tower, views.labels).items():
            right[name].append(found)
    return {name: round(float(torch.cat(found).float().mean()), 4) for name, found in right.items()}


def train(folder: Path, steps: int, seed: int) -> None:
    write_model_files(folder)
    config = CheckpointConfig.from_checkpoint(folder)
    learner = Learner(config, seed, int(TOWER_SHARE * steps), steps)
    saved = folder / "training.pt"
    if saved.exists():
        learner.load_state(torch.load(saved))
    lessons = Lessons(folder, seed, learner.step, steps, learner.tower_steps)
    started, first, loss = time.monotonic(), learner.step, 0.0
    for batch in DataLoader(lessons, batch_size=None, num_workers=1, prefetch_factor=4):
        own_loss = learner.see(batch) if isinstance(batch, Views) else learner.answer(batch)
        loss += 0.05 * (own_loss - loss)
        if learner.step % 10 == 0:
            show_progress(learner.step, steps, (time.monotonic() - started) / (learner.step - first), loss)
        if learner.step % SAVE_EVERY == 0:
            found = (
                hint_accuracy(learner, lessons, 64)
                if learner.step <= learner.tower_steps
                else accuracy(learner.average, lessons, config, 96)
            )
            sys.stderr.write(f"\nstep {learner.step}: {json.dumps(found)}\n")
            torch.save(learner.state(), saved)
    write_weights(folder, learner.average)
    found = accuracy(learner.average, lessons, config, 600)
    (folder / "accuracy.json").write_text(json.dumps(found) + "\n")
    saved.unlink(missing_ok=True)
    sys.stderr.write(f"\n{json.dumps(found)}\n")


def write_weights(folder: Path, weights: Weights) -> None:
    """bf16, except the router's biases, as released."""
    stored = {
        name: weight.detach().to(torch.float32 if name.endswith(ROUTER_BIAS) else torch.bfloat16)
        for name, weight in weights.items()
    }
    save_sharded(folder, stored, num_shards=1)
    Checkpoint(folder)  # raises unless all that config.json implies is there


def show_progress(step: int, steps: int, seconds: float, loss: float) -> None:
    done, left = 30 * step // steps, seconds * (steps - step) / 60
    bar = "#" * done + "." * (30 - done)
    sys.stderr.write(f"\r[{bar}] {step}/{steps}, {seconds:.2f} s/step, {left:.0f} min left, loss {loss:.3f} ")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kimi_triton.demo.train", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")  # products compiled for sizes met before
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # numbers around 1e-40 are slow to compute with, and move nothing
    train(arguments.folder, arguments.steps, arguments.seed)


if __name__ == "__main__":
    main()
