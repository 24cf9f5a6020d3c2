# SPDX-License-Identifier: Apache-2.0
"""A step with the vLLM engine, and the same language model in fp32 beside it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.llm.assembly import vllm_step
from kimi_triton.llm.language_model import load_language_model
from kimi_triton.llm.step import LlmStep
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.llm.vllm_servers import VllmSettings
from kimi_triton.text.tokenizer import KimiTokenizer
from tests.llm.scripted import RecordingCaller, llm_request

GRID = (1, 4, 4)
NEARLY = 0.15  # nats; transformers in bf16 is off by up to 0.08 on the tiny models
TIMEOUT_S = 120.0


class Prompt(NamedTuple):
    """What reaches the language model: ids with placeholders, and the rows (num_image_tokens, hidden) for these."""

    ids: list[int]
    embeds: Tensor
    grids: tuple[tuple[int, ...], ...]


class Stage:
    """The engine under test and, as its oracle, transformers' own class."""

    def __init__(self, folder: Path, url: str) -> None:
        checkpoint = Checkpoint(folder)
        config = checkpoint.config
        self.media_id = config.media_placeholder_token_id
        self.roles = TokenRoles.from_checkpoint(folder, config, KimiTokenizer.from_checkpoint(folder, config))
        loaded = load_language_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
        self.oracle = DeepseekV3ForCausalLM(loaded.config)
        self.oracle.load_state_dict(loaded.state_dict())
        self.oracle.eval()
        self.step: LlmStep = vllm_step(checkpoint, (url,), VllmSettings(retry_after_s=0.1))
        self.step.start()

    def prompt(self, seed: int, num_images: int = 0, image_seed: int = 0) -> Prompt:
        """Random text and images for a tiny model."""
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = torch.randint(300, (5 + seed % 40,), generator=generator).tolist()
        for _ in range(num_images):
            ids += [self.media_id] * 4 + torch.randint(300, (3,), generator=generator).tolist()
        embeds = torch.randn(4 * num_images, 128, generator=torch.Generator().manual_seed(image_seed)).bfloat16()
        return Prompt(ids, embeds, (GRID,) * num_images)

    def submit(self, given: Prompt, **options: object) -> RecordingCaller:
        return submit(self.step, given, **options)

    @torch.no_grad()
    def logprobs(self, given: Prompt, answer: list[int]) -> Tensor:
        """(len(answer), vocab) of transformers, after the same tokens."""
        rows = self.oracle.model.embed_tokens(torch.tensor(given.ids + answer))
        rows[torch.tensor([*given.ids, *[-1] * len(answer)]) == self.media_id] = given.embeds.float()
        logits = self.oracle(inputs_embeds=rows.unsqueeze(0)).logits[0, len(given.ids) - 1 : -1]
        return logits.log_softmax(dim=-1)

    def check_greedy(self, given: Prompt, answer: list[int]) -> int:
        """Each token is nearly the likeliest one allowed; returns how many are exactly that."""
        logprobs = self.logprobs(given, answer)
        logprobs[:, sorted(self.roles.blocked)] = -torch.inf
        chosen = logprobs.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        lost = logprobs.amax(dim=-1) - chosen
        assert lost.max() < NEARLY, lost
        return int((lost == 0).sum())


def submit(step: LlmStep, given: Prompt, **options: object) -> RecordingCaller:
    caller = RecordingCaller()
    step.submit(llm_request(given.ids, given.embeds, given.grids, **options), caller)  # type: ignore[arg-type]
    return caller


def ids_of(caller: RecordingCaller) -> list[int]:
    """The whole answer, once it is there."""
    assert caller.done.wait(TIMEOUT_S)
    caller.wait()
    return [token_id for answer in caller.answers for token_id in answer.token_ids]
