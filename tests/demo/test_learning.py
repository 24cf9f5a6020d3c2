# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import Batch, make_batch
from kimi_triton.demo.hints import projector_rows, right_hints
from kimi_triton.demo.learning import COOL_DOWN, PROJECTOR, WARM_UP, Learner, score
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.questions import number_exercise, scene_exercise
from kimi_triton.demo.trainable import ROUTER_BIAS, tower_states
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
    exercises = [number_exercise(rng, "train", freedom=0.0, num_digits=3), scene_exercise(rng, 1)]
    tokenizer = KimiTokenizer.from_checkpoint(folder, config)
    return make_batch(exercises, [False, True], tokenizer, ImageSettings.from_checkpoint(folder, "kimi_k25"))


def learner_of(config: CheckpointConfig, seed: int = 0, step: int = 0, tower_steps: int = 500) -> Learner:
    learner = Learner(config, seed, tower_steps, steps=1000)
    learner.step = step
    learner._begin_phase()
    return learner


def test_one_batch_is_learned_by_heart(config: CheckpointConfig, batch: Batch) -> None:
    learner = learner_of(config, tower_steps=0, step=WARM_UP)
    losses = [learner.answer(batch) for _ in range(25)]
    assert losses[-1] < 0.2 * losses[0]
    assert all(all(tokens) for tokens in score(learner.weights, config, batch))


def test_the_hints_of_some_pictures_are_learned_by_heart(config: CheckpointConfig, batch: Batch) -> None:
    learner = learner_of(config, step=WARM_UP)
    losses = [learner.see(batch.views) for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]
    tower = tower_states(learner.weights, config, batch.views.pixel_values, batch.views.grids)
    found = right_hints(learner.readers, tower, batch.views.labels)
    assert all(float(found[name].float().mean()) > 0.6 for name in ("kind", "place", "colour"))  # what weighs most


@pytest.mark.parametrize("step", [3, 700])
def test_training_goes_on_from_a_saved_state(config: CheckpointConfig, batch: Batch, tmp_path: Path, step: int) -> None:
    learner, other = learner_of(config, step=step), learner_of(config, seed=1)
    learn_once(learner, batch)
    torch.save(learner.state(), tmp_path / "state.pt")
    other.load_state(torch.load(tmp_path / "state.pt"))
    assert learn_once(learner, batch) == learn_once(other, batch)
    assert all(torch.equal(weight, other.weights[name]) for name, weight in learner.weights.items())


def learn_once(learner: Learner, batch: Batch) -> float:
    return learner.see(batch.views) if learner.is_seeing else learner.answer(batch)


def test_the_rate_warms_up_and_falls_to_zero_in_both_phases(config: CheckpointConfig) -> None:
    learner = learner_of(config)
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


@pytest.mark.parametrize(
    ("step", "trained"), [(0, {"vision_tower"}), (500, {"mm_projector", "language_model"})], ids=["first", "second"]
)
def test_each_phase_moves_its_own_part_alone(
    config: CheckpointConfig, batch: Batch, step: int, trained: set[str]
) -> None:
    learner = learner_of(config, step=step)
    before = {name: weight.clone() for name, weight in learner.weights.items()}
    learn_once(learner, batch)
    moved = {name.split(".")[0] for name, weight in learner.weights.items() if not torch.equal(weight, before[name])}
    assert moved == trained


def test_the_second_phase_begins_with_the_averaged_tower(config: CheckpointConfig, batch: Batch) -> None:
    learner = learner_of(config, step=498)
    for _ in range(2):
        assert learner.is_seeing
        learner.see(batch.views)
    assert not learner.is_seeing
    for name, weight in learner.weights.items():
        assert torch.equal(weight, learner.average[name])
        assert weight.requires_grad == (not name.startswith("vision_tower.") and not name.endswith(ROUTER_BIAS))


def test_the_projector_begins_with_what_the_readers_read(config: CheckpointConfig, batch: Batch) -> None:
    learner = learner_of(config, step=499)
    learner.see(batch.views)
    rows, projector = projector_rows(learner.readers.detach()), learner.weights[PROJECTOR].detach()
    assert torch.equal(projector[: len(rows)], rows)
    assert float(projector[len(rows) :].norm(dim=1).max()) < 1  # beside them the others are faint
