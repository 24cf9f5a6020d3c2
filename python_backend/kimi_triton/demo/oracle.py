# SPDX-License-Identifier: Apache-2.0
"""The same questions answered by transformers' own classes, in one process: no server, and none of our models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Kimi_K25ForConditionalGeneration

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.asking import MAX_TOKENS
from kimi_triton.demo.questions import Exercise
from kimi_triton.preprocess.patches import image_to_patches
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.text.messages import user_message
from kimi_triton.text.prompt import build_prompt
from kimi_triton.text.special_tokens import IM_END, THINK_END
from kimi_triton.text.tokenizer import KimiTokenizer


class TransformersModel:
    """`Kimi_K25ForConditionalGeneration` with greedy decoding, in bf16 as stored."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = KimiTokenizer.from_checkpoint(checkpoint, CheckpointConfig.from_checkpoint(checkpoint))
        self.settings = ImageSettings.from_checkpoint(checkpoint, "kimi_k25")
        self.model = Kimi_K25ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self.model.requires_grad_(False).train(False)

    def answers(self, exercises: Sequence[Exercise], thinking: bool | None = None) -> list[str]:
        return [self.answer(exercise, thinking) for exercise in exercises]

    @torch.no_grad()
    def answer(self, exercise: Exercise, thinking: bool | None = None) -> str:
        items = [image_to_patches(picture.image, i, self.settings) for i, picture in enumerate(exercise.pictures)]
        grids = [item.grid for item in items]
        message = user_message(exercise.question, len(items))
        input_ids = torch.tensor([build_prompt([message], grids, self.tokenizer, "kimi_k25", thinking)])
        pixels = torch.from_numpy(np.concatenate([item.pixel_values for item in items]))
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            pixel_values=((pixels.float() / 255 - 0.5) / 0.5).bfloat16(),
            image_grid_thw=torch.tensor(grids),
            do_sample=False,
            top_k=None,
            max_new_tokens=MAX_TOKENS,
        )
        ids = output[0, input_ids.shape[1] :].tolist()
        control = {self.tokenizer.special(IM_END), self.tokenizer.special(THINK_END)}
        text_ids = [token for token in ids if token not in control]
        return self.tokenizer.decode_bytes(text_ids).decode(errors="replace")
