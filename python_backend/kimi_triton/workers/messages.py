# SPDX-License-Identifier: Apache-2.0
"""What the vision step and its worker processes tell each other. Pixels and rows travel in shared memory instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kimi_triton.vision.grids import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker loads and what it may use; the same for all of a group but for rank and device."""

    checkpoint: Path
    dtype: str
    max_patches_per_forward: int
    num_threads: int
    visible_device: str | None = None  # the one GPU the process sees, as CUDA_VISIBLE_DEVICES names it; None: the CPU
    use_graphs: bool = False
    use_compile: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    collective_timeout_s: float = 120.0

    @property
    def device(self) -> str:
        return "cpu" if self.visible_device is None else "cuda:0"


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a worker. The files are open in it, under these descriptors."""

    settings: WorkerSettings
    pixels_fd: int
    rows_fd: int
    rendezvous_fd: int  # where the ranks that share the weights find each other


@dataclass(frozen=True, slots=True)
class Encode:
    """The pixels of these images lie in the pixel buffer, one after the other."""

    grids: list[Grid]


@dataclass(frozen=True, slots=True)
class Stop:
    """Last message to a worker."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Tensors loaded so far."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker waits for work and answers in rows of this dtype."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Advancing:
    """Still computing, and further than before. Sent now and then, so that slow and stuck can be told apart."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The rows lie in the row buffer, image after image; those of images with an error mean nothing."""

    errors: dict[int, str]  # by image, each wrong in the way of an InvalidRequest


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot go on and ends."""

    reason: str


FromWorker = Progress | Ready | Advancing | Encoded | Failed
