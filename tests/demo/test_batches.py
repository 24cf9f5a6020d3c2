# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.batches import IGNORED, Batch, make_batch
from kimi_triton.demo.curriculum import FREEING, GROWING, LOOKING_UP, Stage
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.numbers import draw_page
from kimi_triton.demo.questions import CONTENTS, multi_image_exercise, number_exercise, scene_exercise
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.text.special_tokens import IM_END, THINK_END, THINK_START
from kimi_triton.text.tokenizer import KimiTokenizer

EXERCISES = [
    number_exercise(random.Random(1), "train"),
    multi_image_exercise(random.Random(2), "train"),
    scene_exercise(random.Random(3)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_model_files(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> KimiTokenizer:
    return KimiTokenizer.from_checkpoint(folder, CheckpointConfig.from_checkpoint(folder))


@pytest.fixture(scope="module")
def batch(tokenizer: KimiTokenizer, folder: Path) -> Batch:
    settings = ImageSettings.from_checkpoint(folder, "kimi_k25")
    return make_batch(EXERCISES, [False, True, False], tokenizer, settings)


def test_answers_are_what_is_learned(batch: Batch, tokenizer: KimiTokenizer) -> None:
    end, close = tokenizer.special(IM_END), tokenizer.special(THINK_END)
    answers = batch.answer_ids.split(batch.answer_lengths)
    for exercise, answer in zip(EXERCISES, answers, strict=True):
        assert answer[-1] == end
        text = [int(token) for token in answer[:-1] if token != close]
        assert tokenizer.decode_bytes(text).decode() == exercise.answer
    assert [int(answer[0]) == close for answer in answers] == [False, True, False]


def test_each_row_predicts_the_token_after_it(batch: Batch, tokenizer: KimiTokenizer) -> None:
    end = tokenizer.special(IM_END)
    following = batch.input_ids.roll(-1)[batch.answer_rows]
    inside = batch.answer_ids != end
    assert torch.equal(following[inside], batch.answer_ids[inside])
    first_rows = batch.answer_rows[torch.tensor([0, *batch.answer_lengths[:-1]]).cumsum(0)]
    endings = [THINK_END, THINK_START, THINK_END]
    assert batch.input_ids[first_rows].tolist() == [tokenizer.special(name) for name in endings]


def test_image_tokens_and_patches_match(batch: Batch) -> None:
    patches = sum(h * w for _, h, w in batch.grids)
    assert len(batch.pixel_values) == len(batch.patch_labels) == patches
    assert int(batch.image_rows.sum()) * 4 == patches
    assert sum(batch.lengths) == len(batch.input_ids)


def test_patch_labels_name_each_digit_once(batch: Batch) -> None:
    _, height, width = batch.grids[0]
    labels = batch.patch_labels[: height * width]
    found = labels[labels[:, 0] > 0]
    by_place = {int(place): int(kind) - 1 for kind, place, _ in found}
    assert "".join(str(by_place[place]) for place in range(len(found))) == EXERCISES[0].answer
    assert bool((labels[labels[:, 0] == 0][:, 1:] == IGNORED).all())


def test_pages_lie_behind_and_no_prompt_has_them(batch: Batch, tokenizer: KimiTokenizer, folder: Path) -> None:
    pages = [draw_page(random.Random(4), "train", 112, 84, warp=0.0)]
    settings = ImageSettings.from_checkpoint(folder, "kimi_k25")
    crowded = make_batch(EXERCISES, [False, True, False], tokenizer, settings, pages)
    assert crowded.grids == [*batch.grids, (1, 6, 8)]
    assert torch.equal(crowded.input_ids, batch.input_ids)
    assert torch.equal(crowded.pixel_values[: len(batch.pixel_values)], batch.pixel_values)
    labels = crowded.patch_labels[-48:]
    assert int((labels[:, 0] > 0).sum()) == len(pages[0].marks)
    assert bool((labels[:, 1] == IGNORED).all())


def test_the_curriculum_ends_at_what_is_examined() -> None:
    start, end, last = (Stage.of_step(step, 3000) for step in (0, GROWING + FREEING, 5000))
    assert (start.max_digits, start.freedom, start.scenes_share, start.multi_image_share) == (1, 0.0, 0.0, 0.0)
    for stage in (end, last):
        assert (stage.max_digits, stage.freedom, stage.max_shapes, stage.has_simple_scenes) == (8, 1.0, 6, False)


def test_the_language_model_begins_its_own_phase_with_simple_scenes_alone() -> None:
    first = Stage.of_step(3000, 3000)
    questions = [first.exercise(random.Random(seed)) for seed in range(50)]
    assert {exercise.kind for exercise in questions} == {"shapes"}
    asked = [text for e in questions for text, _ in ((e.question, e.answer), *e.more)]
    assert not [text for text in asked if text == CONTENTS or text.startswith("Where")]
    assert max(len(e.pictures[0].marks) for e in questions) == 4
    assert first.pages(random.Random(0)) == []
    assert Stage.of_step(3000 + LOOKING_UP, 3000).scenes_share < 1
