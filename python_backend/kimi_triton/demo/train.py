# SPDX-License-Identifier: Apache-2.0
"""Train the demo model: `python -m kimi_triton.demo.train FOLDER` writes a checkpoint and its accuracy.

The state is saved to FOLDER/training.pt every few hundred steps; the same command goes on from there.

The shipped weights took 70 minutes on one core. Their curriculum was changed at steps 1875, 3016 and 4625, which the
script now does by itself; it has not been run from the first step to the last without a stop.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import Batch, make_batch
from kimi_triton.demo.curriculum import Stage
from kimi_triton.demo.exam import held_out_exercises
from kimi_triton.demo.learning import Learner, score
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.tiny import save_sharded
from kimi_triton.demo.trainable import ROUTER_BIAS, Weights
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.text.tokenizer import KimiTokenizer

BATCH_SIZE = 16  # exercises, beside the pages of the curriculum
THINKING_SHARE = 0.4
SAVE_EVERY = 125  # steps


class Lessons(Dataset[Batch]):
    """Batch number i, always the same for a seed."""

    def __init__(self, folder: Path, seed: int, first: int, steps: int, tower_steps: int) -> None:
        self.folder, self.seed, self.first, self.steps, self.tower_steps = folder, seed, first, steps, tower_steps
        self.tokenizer = KimiTokenizer.from_checkpoint(folder, CheckpointConfig.from_checkpoint(folder))
        self.settings = ImageSettings.from_checkpoint(folder, "kimi_k25")

    def __len__(self) -> int:
        return self.steps - self.first

    def __getitem__(self, index: int) -> Batch:
        step = self.first + index
        rng = random.Random(f"{self.seed} {step}")
        stage = Stage.of_step(step, self.tower_steps)
        exercises = [stage.exercise(rng) for _ in range(BATCH_SIZE)]
        thinking = [rng.random() < THINKING_SHARE for _ in exercises]
        return make_batch(exercises, thinking, self.tokenizer, self.settings, stage.pages(rng))


def accuracy(weights: Weights, lessons: Lessons, config: CheckpointConfig, count: int) -> dict[str, float]:
    """Shares of held-out answers that greedy decoding gets right; `digits` counts single tokens of numbers."""
    right: dict[str, list[bool]] = defaultdict(list)
    exercises = held_out_exercises(count)
    for start in range(0, count, BATCH_SIZE):
        part = exercises[start : start + BATCH_SIZE]
        thinking = [index % 2 == 0 for index in range(len(part))]
        batch = make_batch(part, thinking, lessons.tokenizer, lessons.settings)
        for exercise, tokens in zip(part, score(weights, config, batch), strict=True):
            right[exercise.kind].append(all(tokens))
            if exercise.kind == "numbers":
                right["digits"] += tokens[-1 - len(exercise.answer) : -1]
    return {name: round(sum(values) / len(values), 4) for name, values in sorted(right.items())}


def train(folder: Path, steps: int, seed: int) -> None:
    write_model_files(folder)
    config = CheckpointConfig.from_checkpoint(folder)
    learner = Learner(config, seed, steps)
    saved = folder / "training.pt"
    if saved.exists():
        learner.load_state(torch.load(saved))
    lessons = Lessons(folder, seed, learner.step, steps, learner.tower_steps)
    started, first = time.monotonic(), learner.step
    answers, hints = 0.0, 0.0
    for batch in DataLoader(lessons, batch_size=None, num_workers=1, prefetch_factor=4):
        loss, hint_loss = learner.learn(batch)
        answers, hints = answers + 0.05 * (loss - answers), hints + 0.05 * (hint_loss - hints)
        if learner.step % 10 == 0:
            show_progress(learner.step, steps, (time.monotonic() - started) / (learner.step - first), answers, hints)
        if learner.step % SAVE_EVERY == 0:
            found = accuracy(learner.average, lessons, config, 96)
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


def show_progress(step: int, steps: int, seconds: float, answers: float, hints: float) -> None:
    done, left = 30 * step // steps, seconds * (steps - step) / 60
    bar = "#" * done + "." * (30 - done)
    sys.stderr.write(f"\r[{bar}] {step}/{steps}, {seconds:.2f} s/step, {left:.0f} min left, ")
    sys.stderr.write(f"loss {answers:.3f}, hints {hints:.3f} ")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kimi_triton.demo.train", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")  # products compiled for sizes met before
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # numbers around 1e-40 are slow to compute with, and move nothing
    train(arguments.folder, arguments.steps, arguments.seed)


if __name__ == "__main__":
    main()
