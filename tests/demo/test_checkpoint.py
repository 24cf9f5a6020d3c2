# SPDX-License-Identifier: Apache-2.0
"""The trained model that comes with the package."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import torch
from transformers import Kimi_K25ForConditionalGeneration

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.demo import CHECKPOINT
from kimi_triton.demo.exam import held_out_exercises, marks
from kimi_triton.demo.model_files import write_model_files
from kimi_triton.demo.oracle import TransformersModel


def test_it_is_a_whole_checkpoint_of_at_most_25_mb() -> None:
    checkpoint = Checkpoint(CHECKPOINT)
    assert checkpoint.config.family == "kimi_k25"
    dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("e_score_correction_bias")} == {"BF16"}
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 25_000_000


def test_its_other_files_are_those_that_training_writes(tmp_path: Path) -> None:
    write_model_files(tmp_path)
    names = [file.name for file in tmp_path.iterdir()]
    assert filecmp.cmpfiles(tmp_path, CHECKPOINT, names, shallow=False) == (names, [], [])


def test_its_accuracy_lies_beside_it() -> None:
    accuracy = json.loads((CHECKPOINT / "accuracy.json").read_text())
    assert accuracy.keys() >= {"digits", "numbers", "shapes", "multi_image"}


def test_transformers_loads_it_without_remote_code_and_reads_with_it() -> None:
    _, report = Kimi_K25ForConditionalGeneration.from_pretrained(
        CHECKPOINT, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    exercises = held_out_exercises(12, seed=1)
    assert marks(exercises, TransformersModel(CHECKPOINT).answers(exercises))["digits"] > 0.8
