# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import torch

from kimi_triton.demo.hints import (
    IGNORED,
    READERS,
    WEIGHTS,
    hint_loss,
    initial_readers,
    patch_labels,
    projector_rows,
)
from kimi_triton.demo.numbers import draw_number, draw_page
from kimi_triton.demo.pictures import Picture
from kimi_triton.demo.scans import pick_scans
from kimi_triton.demo.scenes import COLOURS, SHAPES, draw_scene
from kimi_triton.preprocess.patches import Grid

NAMES = list(READERS)


def grid_of(picture: Picture) -> Grid:
    return 1, 2 * -(-picture.image.height // 28), 2 * -(-picture.image.width // 28)


def labels_of(picture: Picture) -> list[dict[str, int]]:
    """The labels of patches that hold something."""
    rows = patch_labels(picture, grid_of(picture)).tolist()
    return [dict(zip(NAMES, row, strict=True)) for row in rows if row[0] > 0]


def number(seed: int, digits: str) -> Picture:
    rng = random.Random(seed)
    return draw_number(rng, pick_scans(rng, "train", digits), freedom=1.0, warp=0.0)


def test_labels_name_each_digit_of_a_number_once() -> None:
    for seed in range(20):
        found = labels_of(number(seed, "9075"))
        by_place = {label["place"]: label["kind"] - 1 for label in found}
        assert [by_place[place] for place in range(4)] == [9, 0, 7, 5]
        assert {label["all"] for label in found} == {3}  # four
        assert {label["colour"] for label in found} == {label["same_shape"] for label in found} == {IGNORED}


def test_labels_count_the_shapes_of_a_scene() -> None:
    for seed in range(20):
        picture = draw_scene(random.Random(seed), 6)
        found = labels_of(picture)
        if len(found) < len(picture.marks):
            continue  # two centres in one patch
        assert {label["all"] for label in found} == {len(picture.marks) - 1}
        for label in found:
            shape, colour = SHAPES[label["kind"] - 11], list(COLOURS)[label["colour"]]
            assert label["same_shape"] == sum(mark.shape == shape for mark in picture.marks) - 1
            assert label["same_colour"] == sum(mark.colour == colour for mark in picture.marks) - 1


def test_a_page_has_no_places_and_counts_that_no_reader_can_say_are_left_out() -> None:
    digits = labels_of(draw_page(random.Random(4), "train", 112, 84, warp=0.0))
    assert {label["place"] for label in digits} == {label["all"] for label in digits} == {IGNORED}
    crowd = draw_scene(random.Random(4), 12, (196, 196))
    assert len(crowd.marks) > READERS["all"]
    assert {label["all"] for label in labels_of(crowd)} == {IGNORED}


def test_every_patch_is_told_where_it_lies() -> None:
    labels = patch_labels(number(0, "12"), (1, 4, 16))
    rows, columns = (labels[:, NAMES.index(name)].reshape(4, 16) for name in ("row", "column"))
    assert rows[:, 0].tolist() == [0, 2, 4, 6]
    assert columns[0].tolist() == [value for value in range(8) for _ in range(2)]


def test_labels_fit_their_readers_and_a_blind_reader_only_guesses() -> None:
    pictures = [number(1, "12345678"), draw_scene(random.Random(2), 5)]
    for picture in pictures:
        labels = torch.from_numpy(patch_labels(picture, grid_of(picture)))
        sizes = torch.tensor(list(READERS.values()))
        assert bool(((labels < sizes) & ((labels >= 0) | (labels == IGNORED))).all())
        loss = hint_loss(initial_readers(8), torch.ones(len(labels) + 5, 8), labels)
        told = (labels != IGNORED).any(0)
        torch.testing.assert_close(loss, (sizes.log() * torch.tensor(list(WEIGHTS.values())))[told].sum())


def test_every_reader_has_its_weight() -> None:
    assert list(WEIGHTS) == list(READERS)


def test_the_projector_reads_each_patch_of_a_token_as_the_readers_do() -> None:
    readers = torch.randn(sum(READERS.values()), 16, generator=torch.Generator().manual_seed(0))
    patches = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    read = (projector_rows(readers) @ patches.flatten()).view(4, -1)
    told = torch.nn.functional.layer_norm(readers, (16,)) @ patches.T  # up to a factor for each reader's output
    for seen, by_readers in zip(read, told.T, strict=True):
        assert torch.equal(seen.sign(), by_readers.sign())
        ratios = seen / by_readers
        kind, row = ratios[: READERS["kind"]], ratios[-1]
        assert torch.allclose(kind / row, torch.full_like(kind, 3.0), rtol=1e-3)
