# SPDX-License-Identifier: Apache-2.0
"""The tensors of one request as they reach the LLM step, and whether they can be a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kimi_triton.errors import InvalidRequest
from kimi_triton.llm.fusion import check_placeholders


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmRequest:
    """All tensors are on the CPU."""

    request_id: str  # empty: the step makes one up
    input_ids: NDArray[np.int32]  # (num_tokens,)
    image_grid_thw: NDArray[np.int64]  # (num_images, 3)
    image_embeds: Tensor  # (num_image_tokens, text_hidden_size)
    generation: bytes  # GenerationOptions as JSON
    cached_images: int = 0
    timeout_s: float | None = None  # from now on
    received_s: float | None = None  # time.monotonic() when the first step got it; None: now


def check_prompt(request: LlmRequest, *, context_length: int, vocab_size: int, media_id: int) -> None:
    """Raise InvalidRequest, naming what was found and what was expected."""
    ids, embeds = request.input_ids, request.image_embeds
    if ids.ndim != 1 or not len(ids):
        raise InvalidRequest(f"input_ids has shape {list(ids.shape)}, expected [num_tokens], at least one")
    if len(ids) >= context_length:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens with its images, at most {context_length - 1} fit into the context of "
            f"{context_length} and leave room for an answer"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InvalidRequest(f"input_ids reach from {ids.min()} to {ids.max()}, allowed are 0 to {vocab_size - 1}")
    if embeds.ndim != 2:
        raise InvalidRequest(f"image_embeds has shape {list(embeds.shape)}, expected [num_image_tokens, hidden_size]")
    check_placeholders(ids, request.image_grid_thw, embeds.shape[0], media_id)
