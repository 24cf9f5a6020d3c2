# SPDX-License-Identifier: Apache-2.0
"""Put the LLM step together from the parameters in its config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from kimi_triton.cancel_board import CancelBoard
from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.llm.assembly import transformers_step, vllm_step
from kimi_triton.llm.metrics import LLM_METRICS, LlmMetrics
from kimi_triton.llm.scheduler import EngineLimits
from kimi_triton.llm.step import LlmStep
from kimi_triton.llm.vllm_servers import VllmSettings
from kimi_triton.llm.vllm_urls import parse_urls
from kimi_triton.metric import Metric, MetricSpec
from kimi_triton.progress import progress_printer

DEFAULT = EngineLimits()
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class StepOptions(Protocol):
    """The part of `triton_io.StepOptions` that is read here."""

    device_id: int
    instance_kind: str

    @property
    def cancel_board(self) -> CancelBoard: ...

    def text(self, name: str, default: str | None = None) -> str: ...
    def path(self, name: str) -> Path: ...
    def integer(self, name: str, default: int) -> int: ...
    def metrics(self, specs: Sequence[MetricSpec]) -> Mapping[str, Metric]: ...


def build_step(options: StepOptions) -> LlmStep:
    """A started step. Raises ConfigError."""
    engine = options.text("engine", "transformers")
    if engine not in ENGINES:
        raise ConfigError(f"engine is {engine!r}, expected {' or '.join(ENGINES)}")
    step = ENGINES[engine](options, Checkpoint(options.path("checkpoint")))
    step.start()
    return step


def _transformers(options: StepOptions, checkpoint: Checkpoint) -> LlmStep:
    return transformers_step(
        checkpoint,
        device=torch.device("cuda" if options.instance_kind == "GPU" else "cpu"),
        dtype=_dtype(options.text("dtype", "auto")),
        limits=EngineLimits(
            max_running=options.integer("max_running", DEFAULT.max_running),
            max_waiting=options.integer("max_waiting", DEFAULT.max_waiting),
        ),
        board=options.cancel_board,
        metrics=LlmMetrics(options.metrics(LLM_METRICS)),
        progress=progress_printer("llm"),
    )


def _vllm(options: StepOptions, checkpoint: Checkpoint) -> LlmStep:
    settings = VllmSettings(
        stall_timeout_s=options.integer("vllm_timeout_s", 60),
        start_timeout_s=options.integer("vllm_start_timeout_s", 600),
        read_every_s=options.integer("vllm_chunk_ms", 40) / 1000,
        max_live=options.integer("max_running", DEFAULT.max_running)
        + options.integer("max_waiting", DEFAULT.max_waiting),
    )
    return vllm_step(
        checkpoint,
        parse_urls(options.text("vllm_urls")),
        settings=settings,
        board=options.cancel_board,
        metrics=LlmMetrics(options.metrics(LLM_METRICS)),
    )


ENGINES = {"transformers": _transformers, "vllm": _vllm}


def _dtype(name: str) -> torch.dtype | None:
    """None leaves the choice to the device."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}, expected auto, {' or '.join(DTYPES)}")
    return DTYPES[name]
