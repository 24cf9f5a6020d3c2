# SPDX-License-Identifier: Apache-2.0
"""What the vision tower is taught: linear readers of its last hidden states say what has its centre in a patch.

A picture brings hundreds of such labels, its answer only a few tokens. Without them reading freely placed digits takes
hours. When the tower is finished, the projector begins with what the readers look at.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_triton.config import PATCH_SIZE
from kimi_triton.demo.numbers import MAX_DIGITS
from kimi_triton.demo.pictures import Picture
from kimi_triton.demo.scenes import COLOURS, MAX_SHAPES, SHAPES
from kimi_triton.preprocess.patches import Grid

IGNORED = -100  # cross_entropy skips this label
BINS = 8  # along each side of a picture
# The readers and the number of things each can say. `kind` is nothing, a digit or a shape; `place` the place in the
# number or in the rows of shapes; `all` to `same_colour` count the marks of the picture; `row` and `column` say where
# in the picture the patch lies, which the position table tells most directly.
READERS = {
    "kind": 1 + 10 + len(SHAPES),
    "place": MAX_DIGITS,
    "colour": len(COLOURS),
    "all": MAX_DIGITS,
    "same_shape": MAX_SHAPES,
    "same_colour": MAX_SHAPES,
    "row": BINS,
    "column": BINS,
}
# Of the readers in the loss. With equal ones the counts take most of what the last hidden states can hold, and a
# twentieth of the digits is never told apart.
WEIGHTS = {
    "kind": 1.0,
    "place": 1.0,
    "colour": 0.3,
    "all": 0.1,
    "same_shape": 0.1,
    "same_colour": 0.1,
    "row": 0.03,
    "column": 0.03,
}
GAINS = {"kind": 3.0, "place": 3.0, "colour": 3.0}  # of their rows in the projector; others have 1
EMPTY = 0.05  # weight of a patch without anything for `kind`: nearly all are
Labels = npt.NDArray[np.int64]


def patch_labels(picture: Picture, grid: Grid) -> Labels:
    """(patches, readers) int64, in the order of READERS."""
    _, height, width = grid
    labels = {name: np.full((height, width), IGNORED, np.int64) for name in READERS}
    labels["kind"][:] = 0
    labels["row"][:] = (np.arange(height) * BINS // height)[:, None]
    labels["column"][:] = np.arange(width) * BINS // width
    shapes = Counter(mark.shape for mark in picture.marks)
    colours = Counter(mark.colour for mark in picture.marks)
    for mark in picture.marks:
        at = min(height - 1, int(mark.y / PATCH_SIZE)), min(width - 1, int(mark.x / PATCH_SIZE))
        if mark.place is not None:
            labels["place"][at] = mark.place
        if mark.place is not None or mark.shape is not None:
            labels["all"][at] = _count(len(picture.marks), MAX_DIGITS)
        if mark.digit is not None:
            labels["kind"][at] = 1 + mark.digit
        else:
            labels["kind"][at] = 11 + SHAPES.index(str(mark.shape))
            labels["colour"][at] = list(COLOURS).index(str(mark.colour))
            labels["same_shape"][at] = _count(shapes[mark.shape], MAX_SHAPES)
            labels["same_colour"][at] = _count(colours[mark.colour], MAX_SHAPES)
    return np.stack(list(labels.values()), -1).reshape(-1, len(READERS))


def _count(number: int, largest: int) -> int:
    return number - 1 if number <= largest else IGNORED


def initial_readers(width: int) -> Tensor:
    return torch.zeros(sum(READERS.values()), width).requires_grad_()


def projector_rows(readers: Tensor) -> Tensor:
    """(readers, width) -> (4 * readers, 4 * width): rows with which the projector's first layer reads each of the four
    patches of a token as the readers do.

    What an answer needs most is a small part of what the tower's states vary by, and random rows would drown it.
    """
    gains = torch.cat([torch.full((size, 1), GAINS.get(name, 1.0)) for name, size in READERS.items()])
    rows = gains * F.normalize(readers - readers.mean(1, keepdim=True), dim=1)
    return torch.kron(torch.eye(4), rows)


def hint_loss(readers: Tensor, tower: Tensor, labels: Tensor) -> Tensor:
    """Weighted sum over the readers of their cross entropies; `tower` may have more rows than there are labels."""
    loss = torch.zeros(())
    for name, logits, wanted in _by_reader(readers, tower, labels):
        told = wanted != IGNORED
        if bool(told.any()):
            rarity = torch.tensor([EMPTY] + [1.0] * (logits.shape[1] - 1)) if name == "kind" else None
            loss = loss + WEIGHTS[name] * F.cross_entropy(logits[told].float(), wanted[told], weight=rarity)
    return loss


@torch.no_grad()
def right_hints(readers: Tensor, tower: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """For each reader, which of its labels it says; `kind` only where there is something."""
    found = {}
    for name, logits, wanted in _by_reader(readers, tower, labels):
        told = wanted > 0 if name == "kind" else wanted != IGNORED
        found[name] = logits[told].argmax(-1) == wanted[told]
    return found


def _by_reader(readers: Tensor, tower: Tensor, labels: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    logits = F.linear(tower, readers.to(tower.dtype))[: len(labels)]
    parts = torch.split(logits, list(READERS.values()), 1)
    return list(zip(READERS, parts, labels.unbind(1), strict=True))
