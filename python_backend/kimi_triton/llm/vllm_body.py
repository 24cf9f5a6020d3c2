# SPDX-License-Identifier: Apache-2.0
"""One request as vLLM's completions API takes it: prompt embeddings in, token ids out."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_triton.llm.engine import TokenRequest
from kimi_triton.llm.fusion import merge_image_rows
from kimi_triton.llm.token_roles import TokenRoles

NEVER = -100.0  # vLLM's strongest bias; it has no other way to forbid a token without its tokenizer


class RequestBody:
    """Builds the JSON of a request. Safe to share between threads."""

    def __init__(self, text_rows: Callable[[Tensor], Tensor], roles: TokenRoles, media_token_id: int) -> None:
        self._text_rows = text_rows
        self._media_token_id = media_token_id
        self._fixed = {
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # vLLM runs without a tokenizer
            "stop_token_ids": sorted(roles.stop),
            "logit_bias": {str(token_id): NEVER for token_id in sorted(roles.blocked)},
        }

    def build(self, request: TokenRequest) -> bytes:
        """Raises InvalidRequest when placeholders and image rows do not fit."""
        rows = self._text_rows(request.input_ids)
        merge_image_rows(rows, request.input_ids == self._media_token_id, request.image_embeds)
        fields = json.dumps(self._fixed | _sampling(request)).encode()
        # The embeddings are most of the body by far, and base64 needs no escaping.
        return b"".join((fields[:-1], b', "prompt_embeds": "', _encoded(rows), b'"}'))


def _sampling(request: TokenRequest) -> dict[str, Any]:
    options = request.options
    fields: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
    }
    if options.seed is not None:
        fields["seed"] = options.seed
    if options.logprobs:
        fields["logprobs"] = 0  # that of the sampled token alone
    return fields


def _encoded(rows: Tensor) -> bytes:
    """(num_tokens, hidden_size) as base64 of a saved tensor."""
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return base64.b64encode(buffer.getbuffer())
