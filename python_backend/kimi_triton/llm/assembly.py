# SPDX-License-Identifier: Apache-2.0
"""Put an LLM step together from a checkpoint."""

from __future__ import annotations

import torch

from kimi_triton.cancel_board import CancelBoard
from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.llm.decoder import DeepseekDecoder
from kimi_triton.llm.language_model import Progress, default_dtype, load_language_model
from kimi_triton.llm.metrics import LlmMetrics
from kimi_triton.llm.scheduler import EngineLimits
from kimi_triton.llm.step import LlmStep
from kimi_triton.llm.text_rows import TextRows
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.llm.transformers_engine import TransformersEngine
from kimi_triton.llm.vllm_body import RequestBody
from kimi_triton.llm.vllm_engine import VllmEngine
from kimi_triton.llm.vllm_servers import VllmSettings
from kimi_triton.text.tokenizer import KimiTokenizer


def vllm_step(
    checkpoint: Checkpoint,
    urls: tuple[str, ...],
    settings: VllmSettings | None = None,
    board: CancelBoard | None = None,
    metrics: LlmMetrics | None = None,
) -> LlmStep:
    """An LlmStep, not started yet, whose language model runs in the vLLM servers at `urls`."""
    config = checkpoint.config
    tokenizer = KimiTokenizer.from_checkpoint(checkpoint.folder, config)
    roles = TokenRoles.from_checkpoint(checkpoint.folder, config, tokenizer)
    media_id = config.media_placeholder_token_id
    engine = VllmEngine(
        urls,
        body=RequestBody(TextRows(checkpoint), roles, media_id),
        stop_ids=roles.stop,
        context_length=config.max_position_embeddings,
        settings=settings or VllmSettings(),
    )
    return LlmStep(engine, tokenizer, roles, media_id, board, metrics)


def transformers_step(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    context_length: int | None = None,
    limits: EngineLimits | None = None,
    board: CancelBoard | None = None,
    metrics: LlmMetrics | None = None,
    progress: Progress | None = None,
) -> LlmStep:
    """An LlmStep, not started yet, with the language model of `checkpoint` loaded onto `device`.

    `dtype` is fp32 on a CPU and bf16 on a GPU unless given; `context_length` may only shorten the checkpoint's own.
    """
    config = checkpoint.config
    longest = config.max_position_embeddings
    if context_length is not None and not 1 < context_length <= longest:
        raise ConfigError(f"context length is {context_length}, the checkpoint allows 2 to {longest}")
    tokenizer = KimiTokenizer.from_checkpoint(checkpoint.folder, config)
    roles = TokenRoles.from_checkpoint(checkpoint.folder, config, tokenizer)
    model = load_language_model(checkpoint, device=device, dtype=dtype or default_dtype(device), progress=progress)
    engine = TransformersEngine(
        DeepseekDecoder(model),
        roles=roles,
        media_token_id=config.media_placeholder_token_id,
        context_length=context_length or longest,
        limits=limits,
    )
    return LlmStep(engine, tokenizer, roles, config.media_placeholder_token_id, board, metrics)
