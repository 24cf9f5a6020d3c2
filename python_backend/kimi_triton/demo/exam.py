# SPDX-License-Identifier: Apache-2.0
"""Held-out questions and how answers to them are marked."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from kimi_triton.demo.questions import Exercise, multi_image_exercise, number_exercise, scene_exercise

EXAM_SEED = 1_000_003


def held_out_exercises(count: int, seed: int = EXAM_SEED) -> list[Exercise]:
    """Half numbers, a quarter scenes, a quarter several images, all with scans that training never sees."""
    rng = random.Random(seed)
    kinds = (
        lambda: number_exercise(rng, "held_out"),
        lambda: scene_exercise(rng),
        lambda: number_exercise(rng, "held_out"),
        lambda: multi_image_exercise(rng, "held_out"),
    )
    return [kinds[index % len(kinds)]() for index in range(count)]


def marks(exercises: Sequence[Exercise], answers: Sequence[str]) -> dict[str, float]:
    """Shares of right answers: `numbers`, `shapes` and `multi_image` count whole answers, `digits` counts the digits
    of numbers that stand in the right place."""
    right: dict[str, list[bool]] = defaultdict(list)
    for exercise, answer in zip(exercises, answers, strict=True):
        right[exercise.kind].append(answer == exercise.answer)
        if exercise.kind == "numbers":
            right["digits"] += [answer[place : place + 1] == digit for place, digit in enumerate(exercise.answer)]
    return {name: round(sum(values) / len(values), 4) for name, values in sorted(right.items())}
