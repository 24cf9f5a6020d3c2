# SPDX-License-Identifier: Apache-2.0
"""Names of the control tokens that our prompts are made of. Their ids are always read from the checkpoint."""

from __future__ import annotations

from kimi_triton.config import Family

EOS = "[EOS]"
IM_END = "<|im_end|>"
IM_MIDDLE = "<|im_middle|>"
IM_USER = "<|im_user|>"
IM_ASSISTANT = "<|im_assistant|>"
IM_SYSTEM = "<|im_system|>"

# The same slot has one name in Kimi-VL and another in Kimi-K2.5.
MEDIA_START: dict[Family, str] = {"kimi_vl": "<|media_start|>", "kimi_k25": "<|media_begin|>"}
MEDIA_CONTENT = "<|media_content|>"
MEDIA_PAD = "<|media_pad|>"
MEDIA_END = "<|media_end|>"

THINK_START = "<think>"
THINK_END = "</think>"
TOOL_CALLS_START = "<|tool_calls_section_begin|>"
TOOL_CALLS_END = "<|tool_calls_section_end|>"
TOOL_CALL_START = "<|tool_call_begin|>"
TOOL_CALL_ARGUMENT_START = "<|tool_call_argument_begin|>"
TOOL_CALL_END = "<|tool_call_end|>"

_BOTH = (EOS, IM_END, IM_MIDDLE, IM_USER, IM_ASSISTANT, IM_SYSTEM, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END)
_K25_ONLY = (
    THINK_START,
    THINK_END,
    TOOL_CALLS_START,
    TOOL_CALLS_END,
    TOOL_CALL_START,
    TOOL_CALL_ARGUMENT_START,
    TOOL_CALL_END,
)


def required_tokens(family: Family) -> tuple[str, ...]:
    """Every control token that a prompt or a stop rule of `family` can need."""
    return (*_BOTH, MEDIA_START[family], *(_K25_ONLY if family == "kimi_k25" else ()))
