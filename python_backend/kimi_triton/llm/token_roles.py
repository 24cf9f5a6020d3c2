# SPDX-License-Identifier: Apache-2.0
"""What the control tokens of a checkpoint mean in an answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_triton.config import CheckpointConfig
from kimi_triton.text import special_tokens as names
from kimi_triton.text.stop_ids import stop_token_ids
from kimi_triton.text.tokenizer import KimiTokenizer

TOOL_TOKENS = (
    names.TOOL_CALLS_START,
    names.TOOL_CALLS_END,
    names.TOOL_CALL_START,
    names.TOOL_CALL_ARGUMENT_START,
    names.TOOL_CALL_END,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRoles:
    """A control token ends the answer, switches reasoning on or off, is shown by its name, or is never sampled."""

    stop: frozenset[int]
    think_start: int | None  # None for Kimi-VL, which marks its reasoning in plain text
    think_end: int | None
    shown: frozenset[int]  # marks of tool calls, for callers that parse them
    blocked: frozenset[int]  # media, turns, padding and slots without a name

    @classmethod
    def from_checkpoint(cls, folder: Path, config: CheckpointConfig, tokenizer: KimiTokenizer) -> TokenRoles:
        stop = stop_token_ids(folder, config, tokenizer)
        think: list[int] = []
        shown: frozenset[int] = frozenset()
        if config.family == "kimi_k25":
            think = [tokenizer.special(names.THINK_START), tokenizer.special(names.THINK_END)]
            shown = frozenset(map(tokenizer.special, TOOL_TOKENS))
        return cls(
            stop=stop,
            think_start=think[0] if think else None,
            think_end=think[1] if think else None,
            shown=shown,
            blocked=frozenset(tokenizer.control_ids) - stop - shown - frozenset(think),
        )

    def in_reasoning(self, input_ids: NDArray[np.int32]) -> bool:
        """Whether a prompt (num_tokens,) ends inside a thought that it has opened."""
        if self.think_start is None:
            return False
        opened, closed = (np.flatnonzero(input_ids == token_id) for token_id in (self.think_start, self.think_end))
        return bool(len(opened)) and (not len(closed) or bool(opened[-1] > closed[-1]))
