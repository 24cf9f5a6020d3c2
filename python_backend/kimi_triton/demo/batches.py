# SPDX-License-Identifier: Apache-2.0
"""From pictures and exercises to the tensors of one step, through the server's own preprocessing and prompt code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kimi_triton.demo.hints import patch_labels
from kimi_triton.demo.pictures import Picture
from kimi_triton.demo.questions import Exercise
from kimi_triton.preprocess.patches import Grid, image_to_patches
from kimi_triton.preprocess.settings import ImageSettings
from kimi_triton.text.messages import Message, TextPart, user_message
from kimi_triton.text.prompt import build_prompt
from kimi_triton.text.special_tokens import IM_END, MEDIA_PAD, THINK_END
from kimi_triton.text.tokenizer import KimiTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """Packed pictures for the vision tower, and what it should see in them."""

    pixel_values: Tensor  # (patches, 3, 14, 14) uint8
    grids: list[Grid]
    labels: Tensor  # (patches, readers), see hints


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Packed inputs and targets of some exercises."""

    views: Views
    input_ids: Tensor  # (tokens,), one prompt with its answer behind the other
    lengths: list[int]
    image_rows: Tensor  # which tokens are image tokens
    answer_rows: Tensor  # tokens that predict a token of an answer
    answer_ids: Tensor  # what they should predict
    answer_weights: Tensor  # of these in the loss: an exercise weighs the same however long its answers are
    answer_lengths: list[int]


def make_views(pictures: Sequence[Picture], settings: ImageSettings) -> Views:
    patches = [image_to_patches(picture.image, 0, settings) for picture in pictures]
    grids = [item.grid for item in patches]
    labels = [patch_labels(picture, grid) for picture, grid in zip(pictures, grids, strict=True)]
    pixel_values = torch.from_numpy(np.concatenate([item.pixel_values for item in patches]))
    return Views(pixel_values, grids, torch.from_numpy(np.concatenate(labels)))


def make_batch(
    exercises: Sequence[Exercise], thinking: Sequence[bool], tokenizer: KimiTokenizer, settings: ImageSettings
) -> Batch:
    """`thinking` says for each exercise which of the two prompt endings is used; the thought is always empty."""
    views = make_views([picture for exercise in exercises for picture in exercise.pictures], settings)
    grids = iter(views.grids)
    ids: list[int] = []
    lengths: list[int] = []
    answer_rows: list[int] = []
    answer_ids: list[int] = []
    answer_lengths: list[int] = []
    answer_weights: list[float] = []
    for exercise, thinks in zip(exercises, thinking, strict=True):
        own = [next(grids) for _ in exercise.pictures]
        messages: list[Message] = []
        first = len(answer_ids)
        for question, answer in ((exercise.question, exercise.answer), *exercise.more):
            messages.append(user_message(question, 0 if messages else len(own)))
            # The last prompt begins with all the prompts and answers before it.
            prompt = build_prompt(messages, own, tokenizer, settings.family, thinks)
            said = answer_tokens(answer, thinks, tokenizer)
            answer_rows += range(len(ids) + len(prompt) - 1, len(ids) + len(prompt) + len(said) - 1)
            answer_ids += said
            answer_lengths.append(len(said))
            messages.append(Message(role="assistant", parts=(TextPart(answer),)))
        num_own = len(answer_ids) - first
        answer_weights += [1 / (num_own * len(exercises))] * num_own
        lengths.append(len(prompt) + len(said) - 1)
        ids += prompt + said[:-1]
    input_ids = torch.tensor(ids)
    return Batch(
        views=views,
        input_ids=input_ids,
        lengths=lengths,
        image_rows=input_ids == tokenizer.special(MEDIA_PAD),
        answer_rows=torch.tensor(answer_rows),
        answer_ids=torch.tensor(answer_ids),
        answer_weights=torch.tensor(answer_weights),
        answer_lengths=answer_lengths,
    )


def answer_tokens(answer: str, thinking: bool, tokenizer: KimiTokenizer) -> list[int]:
    """The ids that should follow the prompt; a prompt that opened a thought gets it closed at once."""
    closing = [tokenizer.special(THINK_END)] if thinking else []
    return [*closing, *tokenizer.encode(answer), tokenizer.special(IM_END)]
