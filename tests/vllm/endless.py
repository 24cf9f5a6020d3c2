# SPDX-License-Identifier: Apache-2.0
"""Random models whose greedy answers always have the full length."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.text.tokenizer import KimiTokenizer

OUTPUT_ROWS = "language_model.lm_head.weight"


def make_endless(folder: Path) -> Path:
    """Change a tiny checkpoint so that the logits of stop tokens are 0, which is below the largest of 500 others."""
    checkpoint = Checkpoint(folder)
    tokenizer = KimiTokenizer.from_checkpoint(folder, checkpoint.config)
    stop_ids = sorted(TokenRoles.from_checkpoint(folder, checkpoint.config, tokenizer).stop)
    file = checkpoint.tensors[OUTPUT_ROWS].file
    tensors = load_file(file)
    tensors[OUTPUT_ROWS][stop_ids] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
