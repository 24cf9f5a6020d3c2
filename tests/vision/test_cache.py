# SPDX-License-Identifier: Apache-2.0
"""The image cache and the encoder that stands behind it, with a stand-in for the model."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kimi_triton.errors import InvalidRequest, KimiError, Unavailable
from kimi_triton.vision.cache import EmbeddingCache
from kimi_triton.vision.grids import Grid, num_image_tokens
from kimi_triton.vision.remembering import EncodedImage, Image, RememberingEncoder
from kimi_triton.vision.work_log import WorkLog

HIDDEN = 8
ROW_BYTES = 2 * HIDDEN


class CountingEncoder:
    """Rows made of an image's first pixel; remembers which images it was given. 255 is an image it cannot encode."""

    num_restarts = 0

    def __init__(self) -> None:
        self.work_log = WorkLog(16_384)
        self.batches: list[list[int]] = []

    def encode(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor | KimiError]:
        values = [int(image[0, 0, 0, 0]) for image in images]
        self.batches.append(values)
        whole = torch.cat(
            [torch.full((num_image_tokens(grid), HIDDEN), float(v)) for v, grid in zip(values, grids, strict=True)]
        ).bfloat16()
        views = torch.split(whole, [num_image_tokens(grid) for grid in grids])
        return [InvalidRequest("not finite") if v == 255 else view for v, view in zip(values, views, strict=True)]

    def stop(self) -> None:
        """Nothing to stop."""


def image(value: int, grid: Grid = (1, 2, 4)) -> Image:
    t, h, w = grid
    return Image(bytes([value, *grid]), torch.full((t * h * w, 3, 14, 14), value, dtype=torch.uint8), grid)


def remembering(max_bytes: int = 1 << 20) -> tuple[RememberingEncoder, CountingEncoder]:
    counting = CountingEncoder()
    return RememberingEncoder(counting, b"weights", max_bytes), counting


def rows_of(encoded: EncodedImage) -> Tensor:
    assert isinstance(encoded.rows, Tensor)
    return encoded.rows


def test_the_least_recently_used_entry_leaves_first() -> None:
    cache = EmbeddingCache(3 * ROW_BYTES)
    rows = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    for key in (b"a", b"b", b"c"):
        cache.put(key, rows.clone())
    assert cache.get(b"a", 1) is not None  # now b is the oldest
    cache.put(b"d", rows.clone())
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.get(key, 1) is not None] == [b"a", b"c", b"d"]
    assert cache.num_bytes == 3 * ROW_BYTES


def test_f4_entries_own_their_storage_and_stay_within_the_budget() -> None:
    cache = EmbeddingCache(10 * ROW_BYTES)
    pack = torch.zeros(1000, HIDDEN, dtype=torch.bfloat16)
    for start in range(0, 1000, 3):
        cache.put(start.to_bytes(2, "big"), pack[start : start + 3])
        assert cache.num_bytes <= 10 * ROW_BYTES
    held = cache.get((999).to_bytes(2, "big"), 1)
    assert held is not None
    assert held.untyped_storage().nbytes() == ROW_BYTES


def test_f4_an_image_above_the_budget_is_served_but_not_kept() -> None:
    encoder, counting = remembering(max_bytes=2 * ROW_BYTES)
    large = image(7, (1, 4, 4))
    for _ in range(2):
        (encoded,) = encoder.encode([large])
        assert rows_of(encoded).shape == (4, HIDDEN)
        assert not encoded.is_cached
    assert len(counting.batches) == 2
    assert len(encoder.cache) == 0


def test_f4_5000_images_leave_the_cache_level() -> None:
    encoder, counting = remembering(max_bytes=100 * ROW_BYTES)
    for number in range(5000):
        grid = (1, 2 * (1 + number % 7), 2 * (1 + number % 11))
        encoder.encode([Image(number.to_bytes(4, "big"), torch.zeros(1, 3, 14, 14, dtype=torch.uint8), grid)])
        assert encoder.cache.num_bytes <= 100 * ROW_BYTES
    assert len(counting.batches) == 5000
    assert encoder._in_flight == {}


def test_a_hit_equals_what_was_encoded_and_costs_nothing() -> None:
    encoder, counting = remembering()
    first = encoder.encode([image(1), image(2)])
    second = encoder.encode([image(2), image(3), image(1)])
    assert counting.batches == [[1, 2], [3]]
    assert [encoded.is_cached for encoded in first] == [False, False]
    assert [encoded.is_cached for encoded in second] == [True, False, True]
    assert torch.equal(rows_of(second[2]), rows_of(first[0]))
    assert [int(rows_of(encoded)[0, 0]) for encoded in second] == [2, 3, 1]


def test_equal_images_of_one_batch_are_encoded_once() -> None:
    encoder, counting = remembering()
    encoded = encoder.encode([image(1), image(2), image(1), image(1)])
    assert counting.batches == [[1, 2]]
    assert [int(rows_of(one)[0, 0]) for one in encoded] == [1, 2, 1, 1]
    assert [one.is_cached for one in encoded] == [False, False, True, True]


def test_a_budget_of_zero_turns_everything_off() -> None:
    encoder, counting = remembering(max_bytes=0)
    encoded = encoder.encode([image(1), image(1)])
    assert counting.batches == [[1, 1]]
    assert not any(one.is_cached for one in encoded)


def test_d1_rows_that_are_not_finite_are_never_stored() -> None:
    encoder, counting = remembering()
    for _ in range(2):
        bad, good = encoder.encode([image(255), image(4)])
        assert isinstance(bad.rows, InvalidRequest)
        assert isinstance(good.rows, Tensor)
    assert counting.batches == [[255, 4], [255]]


def test_f1_images_with_equal_bytes_and_another_grid_do_not_share() -> None:
    encoder, counting = remembering()
    wide, tall = encoder.encode([image(1, (1, 2, 8)), image(1, (1, 8, 2))])
    assert counting.batches == [[1, 1]]
    assert len(rows_of(wide)) == len(rows_of(tall)) == 4


def test_f2_an_entry_with_a_row_too_few_is_dropped_and_encoded_again() -> None:
    encoder, counting = remembering()
    encoder.encode([image(1)])
    encoder.cache.put(b"weights" + image(1).key, torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
    (encoded,) = encoder.encode([image(1)])
    assert len(rows_of(encoded)) == 2
    assert not encoded.is_cached
    assert encoder.cache.num_mismatches == 1
    assert len(counting.batches) == 2


def test_equal_images_in_flight_are_awaited_not_repeated() -> None:
    encoder, counting = remembering()
    started, proceed = threading.Event(), threading.Event()
    plain_encode = counting.encode

    def slow_encode(images: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor | KimiError]:
        started.set()
        assert proceed.wait(10)
        return plain_encode(images, grids)

    counting.encode = slow_encode  # type: ignore[method-assign]
    results: dict[str, EncodedImage] = {}
    first = threading.Thread(target=lambda: results.update(first=encoder.encode([image(1)])[0]))
    second = threading.Thread(target=lambda: results.update(second=encoder.encode([image(1)])[0]))
    first.start()
    assert started.wait(10)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    proceed.set()
    first.join(10)
    second.join(10)
    assert counting.batches == [[1]]
    assert not results["first"].is_cached
    assert results["second"].is_cached
    assert torch.equal(rows_of(results["first"]), rows_of(results["second"]))


def test_a_failure_reaches_those_who_wait_and_is_forgotten() -> None:
    encoder, counting = remembering()

    def fail(_images: Sequence[Tensor], _grids: Sequence[Grid]) -> list[Tensor | KimiError]:
        raise Unavailable("gone")

    plain_encode, counting.encode = counting.encode, fail  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="gone"):
        encoder.encode([image(1), image(1)])
    counting.encode = plain_encode  # type: ignore[method-assign]
    (encoded,) = encoder.encode([image(1)])
    assert isinstance(encoded.rows, Tensor)
