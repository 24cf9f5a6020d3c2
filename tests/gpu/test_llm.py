# SPDX-License-Identifier: Apache-2.0
"""The LLM step on a GPU: in fp32 its tokens are those of the CPU, in bf16 it answers in company as it does alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.llm.assembly import transformers_step
from tests.llm.scripted import RecordingCaller, llm_request

pytestmark = pytest.mark.gpu


def answers(folder: Path, device: str, dtype: torch.dtype | None, **options: object) -> list[list[int]]:
    step = transformers_step(Checkpoint(folder), device=torch.device(device), dtype=dtype)
    media_id = step._media_token_id
    step.start()
    callers = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(300, (5 + 60 * seed,), generator=generator).tolist() + [media_id] * 4 + [1]
        embeds = torch.randn(4, 128, generator=generator).bfloat16()
        callers.append(RecordingCaller())
        step.submit(llm_request(ids, embeds, [(1, 4, 4)], max_tokens=24, **options), callers[-1])  # type: ignore[arg-type]
    found = [list(caller.wait().token_ids) for caller in callers]
    step.stop()
    return found


@pytest.mark.parametrize("family", ["tiny_k25", "tiny_vl"])
def test_fp32_tokens_equal_those_of_the_cpu(family: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(family)
    for options in ({}, {"temperature": 1.0, "seed": 1, "top_p": 0.9, "repetition_penalty": 1.1}):
        assert answers(folder, "cuda", torch.float32, **options) == answers(folder, "cpu", torch.float32, **options)


def test_bf16_is_the_default_and_answers(tiny_k25: Path) -> None:
    found = answers(tiny_k25, "cuda", None)
    assert all(found)
    assert len({tuple(ids) for ids in found}) > 6
