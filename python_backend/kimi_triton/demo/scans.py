# SPDX-License-Identifier: Apache-2.0
"""Scanned handwritten digits (scikit-learn's digits set, 1,797 scans of 8x8 pixels), cut once into two disjoint parts.

A fifth of the scans of each digit is held out, drawn with a fixed seed. Training never sees it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from kimi_triton.errors import ConfigError

Part = Literal["train", "held_out"]
SPLIT_SEED = 20_26
HELD_OUT_SHARE = 5  # one of this many
INK_LEVELS = 16  # scans count ink from 0 to 16


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """One handwritten digit: `ink` is (8, 8) uint8, 255 where the pen was."""

    digit: int
    ink: npt.NDArray[np.uint8]
    number: int  # its row in scikit-learn's set


@cache
def load_scans(part: Part) -> tuple[tuple[Scan, ...], ...]:
    """The scans of a part, grouped by digit: ten tuples. Raises ConfigError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as exc:
        raise ConfigError(f"{exc.name} is missing, which brings the scans: pip install 'kimi-triton[train]'") from exc
    digits = load_digits()
    ink = np.clip(digits.images * (255 / INK_LEVELS), 0, 255).astype(np.uint8)
    groups = []
    for digit in range(10):
        numbers = np.flatnonzero(digits.target == digit).tolist()
        random.Random(f"{SPLIT_SEED} {digit}").shuffle(numbers)
        cut = len(numbers) // HELD_OUT_SHARE
        chosen = numbers[:cut] if part == "held_out" else numbers[cut:]
        groups.append(tuple(Scan(digit, ink[number], number) for number in chosen))
    return tuple(groups)


def pick_scans(rng: random.Random, part: Part, digits: str) -> list[Scan]:
    """A scan drawn at random for each character of `digits`."""
    scans = load_scans(part)
    return [rng.choice(scans[int(digit)]) for digit in digits]
