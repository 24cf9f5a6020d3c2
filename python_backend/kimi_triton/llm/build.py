# SPDX-License-Identifier: Apache-2.0
"""Put the LLM step together from the parameters in its config.pbtxt."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.llm.decoder import DeepseekDecoder
from kimi_triton.llm.language_model import default_dtype, load_language_model
from kimi_triton.llm.step import LlmStep
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.llm.transformers_engine import TransformersEngine
from kimi_triton.progress import progress_printer
from kimi_triton.text.tokenizer import KimiTokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class StepOptions(Protocol):
    """The part of `triton_io.StepOptions` that is read here."""

    device_id: int
    instance_kind: str

    def text(self, name: str, default: str | None = None) -> str: ...
    def path(self, name: str) -> Path: ...


def build_step(options: StepOptions) -> LlmStep:
    """A started step. Raises ConfigError."""
    checkpoint = Checkpoint(options.path("checkpoint"))
    config = checkpoint.config
    tokenizer = KimiTokenizer.from_checkpoint(checkpoint.folder, config)
    roles = TokenRoles.from_checkpoint(checkpoint.folder, config, tokenizer)
    device = torch.device("cuda" if options.instance_kind == "GPU" else "cpu")
    model = load_language_model(
        checkpoint, device=device, dtype=_dtype(options.text("dtype", "auto"), device), progress=progress_printer("llm")
    )
    engine = TransformersEngine(
        DeepseekDecoder(model),
        roles=roles,
        media_token_id=config.media_placeholder_token_id,
        context_length=config.max_position_embeddings,
    )
    step = LlmStep(engine, tokenizer, roles, config.media_placeholder_token_id)
    step.start()
    return step


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return default_dtype(device)
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}, expected auto, {' or '.join(DTYPES)}")
    return DTYPES[name]
