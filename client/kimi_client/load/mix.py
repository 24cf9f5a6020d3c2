# SPDX-License-Identifier: Apache-2.0
"""What the requests of a load test look like: how large and how many their pictures are, and how long their prompts.

A mix is drawn from a seed, so that two runs, today and after a change, send the same requests.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from PIL import Image

from kimi_client.errors import InvalidRequest

Weighted: TypeAlias = tuple[tuple[int, float], ...]
"""Numbers and how often each is drawn, relative to the others."""

WORDS = ("what", "where", "which", "colour", "shape", "count", "describe", "compare", "the", "of", "left", "large")
JPEG_QUALITY = 85
COARSE_PX = 16  # pictures are smooth at this scale, so that their files are as large as photographs'


@dataclass(frozen=True, slots=True)
class Size:
    """A picture's size in pixels and how often it is drawn, relative to the others."""

    width: int
    height: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A distribution of requests."""

    image_sizes: tuple[Size, ...] = (Size(640, 480, 1.0),)
    images_per_request: Weighted = ((1, 1.0),)
    repeat_rate: float = 0.0  # share of the pictures that were sent before
    prompt_words: Weighted = ((16, 1.0),)
    max_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.repeat_rate <= 1:
            raise InvalidRequest(f"the repeat rate must be between 0 and 1, got {self.repeat_rate}")
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """One request of a mix: its question and the JPEG files of its pictures."""

    prompt: str
    images: tuple[bytes, ...]


def draw_requests(mix: Mix, count: int) -> list[DrawnRequest]:
    """Draw `count` requests. Pictures that do not repeat are all different, and so are the prompts."""
    rng = random.Random(mix.seed)
    pool: list[bytes] = []
    requests = []
    for index in range(count):
        images = tuple(_picture(mix, rng, pool) for _ in range(_pick(mix.images_per_request, rng)))
        words = [str(index), *rng.choices(WORDS, k=max(0, _pick(mix.prompt_words, rng) - 1))]
        requests.append(DrawnRequest(" ".join(words), images))
    return requests


def make_jpeg(width: int, height: int, seed: int) -> bytes:
    """Return a picture of coloured clouds that no other seed gives."""
    coarse = np.random.default_rng(seed).integers(
        0, 256, (2 + height // COARSE_PX, 2 + width // COARSE_PX, 3), np.uint8
    )
    packed = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(packed, "JPEG", quality=JPEG_QUALITY)
    return packed.getvalue()


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Read "640x480:3,224x224" as sizes with weights, 1 where none is given."""
    sizes = []
    for size, weight in _pairs(text):
        width, cross, height = size.partition("x")
        if not (cross and width.isdigit() and height.isdigit() and int(width) and int(height)):
            raise InvalidRequest(f"expected picture sizes like 640x480:3,224x224:1, got {text!r}")
        sizes.append(Size(int(width), int(height), weight))
    return tuple(sizes)


def parse_weighted(text: str) -> Weighted:
    """Read "0:1,1:4,2" as numbers with weights, 1 where none is given."""
    pairs = _pairs(text)
    if not all(number.isdigit() for number, _ in pairs):
        raise InvalidRequest(f"expected whole numbers with weights like 0:1,1:4, got {text!r}")
    return tuple((int(number), weight) for number, weight in pairs)


def _picture(mix: Mix, rng: random.Random, pool: list[bytes]) -> bytes:
    if pool and rng.random() < mix.repeat_rate:
        return rng.choice(pool)
    (size,) = rng.choices(mix.image_sizes, weights=[size.weight for size in mix.image_sizes])
    pool.append(make_jpeg(size.width, size.height, seed=mix.seed * 1_000_003 + len(pool)))
    return pool[-1]


def _pick(weighted: Weighted, rng: random.Random) -> int:
    (number,) = rng.choices([number for number, _ in weighted], weights=[weight for _, weight in weighted])
    return number


def _pairs(text: str) -> Sequence[tuple[str, float]]:
    pairs = []
    for part in text.split(","):
        number, colon, weight = part.strip().partition(":")
        try:
            pairs.append((number, float(weight) if colon else 1.0))
        except ValueError:
            raise InvalidRequest(f"expected a number after the colon in {part!r}") from None
    if any(weight < 0 for _, weight in pairs) or not any(weight > 0 for _, weight in pairs):
        raise InvalidRequest(f"weights must not be negative, nor all zero, got {text!r}")
    return pairs
