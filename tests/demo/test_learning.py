# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import Batch, make_batch
from kimi_triton.demo.learning import COOL_DOWN, WARM_UP, Learner, score
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.questions import number_exercise, scene_exercise
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.text.tokenizer import KimiTokenizer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CheckpointConfig:
    return CheckpointConfig.from_checkpoint(files(tmp_path_factory.mktemp("learning")))


def files(folder: Path) -> Path:
    write_model_files(folder)
    return folder


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, config: CheckpointConfig) -> Batch:
    folder = files(tmp_path_factory.mktemp("batch"))
    rng = random.Random(0)
    exercises = [number_exercise(rng, "train", 3, freedom=0.0), scene_exercise(rng, 1)]
    tokenizer = KimiTokenizer.from_checkpoint(folder, config)
    return make_batch(exercises, [False, True], tokenizer, ImageSettings.from_checkpoint(folder, "kimi_k25"))


def test_one_batch_is_learned_by_heart(config: CheckpointConfig, batch: Batch) -> None:
    learner = Learner(config, seed=0, steps=1000)
    learner.step = WARM_UP
    losses = [learner.learn(batch) for _ in range(25)]
    assert losses[-1][0] < 0.2 * losses[0][0]
    assert losses[-1][1] < losses[0][1]
    assert all(all(tokens) for tokens in score(learner.weights, config, batch))


def test_training_goes_on_from_a_saved_state(config: CheckpointConfig, batch: Batch, tmp_path: Path) -> None:
    learner, other = Learner(config, seed=0, steps=1000), Learner(config, seed=1, steps=1000)
    learner.learn(batch)
    torch.save(learner.state(), tmp_path / "state.pt")
    other.load_state(torch.load(tmp_path / "state.pt"))
    assert learner.learn(batch) == other.learn(batch)
    assert all(torch.equal(weight, other.weights[name]) for name, weight in learner.weights.items())


def test_the_rate_warms_up_and_falls_to_zero_in_both_phases(config: CheckpointConfig) -> None:
    learner = Learner(config, seed=0, steps=1000)
    rates = []
    for learner.step in range(1001):
        rates.append(learner._rate())
    first, second = rates[: learner.tower_steps], rates[learner.tower_steps :]
    for phase in (first, second):
        assert phase[0] == 1 / WARM_UP
        assert phase[-1] < 0.01
        top = phase.index(max(phase))
        assert phase == sorted(phase[:top]) + sorted(phase[top:], reverse=True)
    assert first[WARM_UP] == first[int(learner.tower_steps * (1 - COOL_DOWN)) - 1] == 1.0


def test_the_second_phase_leaves_the_vision_tower_as_it_is(config: CheckpointConfig, batch: Batch) -> None:
    learner = Learner(config, seed=0, steps=1000)
    learner.step = learner.tower_steps
    before = {name: weight.clone() for name, weight in learner.weights.items()}
    learner.learn(batch)
    moved = {name.split(".")[0] for name, weight in learner.weights.items() if not torch.equal(weight, before[name])}
    assert moved == {"mm_projector", "language_model"}


def test_the_second_phase_keeps_the_averaged_tower_and_begins_anew_with_the_rest(config: CheckpointConfig) -> None:
    learner = Learner(config, seed=0, steps=1000)
    fresh = {name: weight.clone() for name, weight in learner.weights.items()}
    with torch.no_grad():
        for name, weight in learner.weights.items():
            weight.add_(1.0)
            learner.average[name].copy_(weight + 1.0)
    learner.step = learner.tower_steps
    learner._finish_tower()
    for name, weight in learner.weights.items():
        wanted = fresh[name] + 1.0 + 1.0 if name.startswith("vision_tower.") else fresh[name]
        assert torch.equal(weight, wanted)
        assert torch.equal(weight, learner.average[name])
