# SPDX-License-Identifier: Apache-2.0
"""Rows of the token embedding, read where the checkpoint stores them: a 1T checkpoint is not loaded for its text."""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError

TABLE = "language_model.model.embed_tokens.weight"
DTYPES = {"BF16": (np.uint16, torch.bfloat16), "F16": (np.float16, torch.float16), "F32": (np.float32, torch.float32)}


class TextRows:
    """The table mapped into memory; the system keeps the pages of common tokens at hand. Safe to share."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        info = checkpoint.tensors[TABLE]
        if info.dtype not in DTYPES:
            raise ConfigError(f"{TABLE} is stored as {info.dtype}, expected one of {', '.join(DTYPES)}")
        stored, self.dtype = DTYPES[info.dtype]
        with info.file.open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_length))
        start = 8 + header_length + header[TABLE]["data_offsets"][0]
        self._table = np.memmap(info.file, stored, mode="r", offset=start, shape=info.shape)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """(num_tokens,) int64 -> (num_tokens, hidden_size) in the stored dtype, a copy."""
        return torch.from_numpy(self._table[token_ids.numpy()]).view(self.dtype)
