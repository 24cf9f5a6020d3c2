# SPDX-License-Identifier: Apache-2.0
"""Put the LLM step together from the parameters in its config.pbtxt."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from kimi_triton.cancel_board import CancelBoard
from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.llm.assembly import transformers_step
from kimi_triton.llm.step import LlmStep
from kimi_triton.progress import progress_printer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class StepOptions(Protocol):
    """The part of `triton_io.StepOptions` that is read here."""

    device_id: int
    instance_kind: str

    @property
    def cancel_board(self) -> CancelBoard: ...

    def text(self, name: str, default: str | None = None) -> str: ...
    def path(self, name: str) -> Path: ...


def build_step(options: StepOptions) -> LlmStep:
    """A started step. Raises ConfigError."""
    device = torch.device("cuda" if options.instance_kind == "GPU" else "cpu")
    step = transformers_step(
        Checkpoint(options.path("checkpoint")),
        device=device,
        dtype=_dtype(options.text("dtype", "auto")),
        board=options.cancel_board,
        progress=progress_printer("llm"),
    )
    step.start()
    return step


def _dtype(name: str) -> torch.dtype | None:
    """None leaves the choice to the device."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}, expected auto, {' or '.join(DTYPES)}")
    return DTYPES[name]
