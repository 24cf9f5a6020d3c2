# SPDX-License-Identifier: Apache-2.0
"""The text that leaves the running server against transformers' own `generate` on the same checkpoint.

Nothing of kimi_triton makes the oracle's inputs: prompts are written out as the spec has them, tokens come from plain
tiktoken, pixels from Pillow and numpy. One thing is taken over: image rows travel between the steps as bf16, so the
oracle's projector rounds its output the same way.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import torch
from PIL import Image
from transformers import Kimi_K25ForConditionalGeneration

pytestmark = pytest.mark.server
MAX_TOKENS = 32
SYSTEM = "<|im_system|>system<|im_middle|>{}<|im_end|>"
USER = "<|im_user|>user<|im_middle|>{}<|im_end|>"
MEDIA = "<|media_begin|>image<|media_content|>{}<|media_end|>\n"
ANSWER = "<|im_assistant|>assistant<|im_middle|><think></think>"


class Oracle:
    """transformers' model in fp32 with a plain tiktoken encoding beside it."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = Kimi_K25ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.model.model.mm_projector.register_forward_hook(lambda _module, _inputs, rows: rows.bfloat16().float())
        lines = (checkpoint / "tiktoken.model").read_text().splitlines()
        ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
        named = json.loads((checkpoint / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        self.special = {entry["content"]: int(token_id) for token_id, entry in named.items()}
        # Letters, digits and the rest apart is all that the tiny vocabulary of pairs can tell.
        pattern = r" ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+[\r\n]*|\s+"
        self.encoding = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special)
        stop = {self.special["[EOS]"], self.special["<|im_end|>"]}
        spoken = stop | {token_id for name, token_id in self.special.items() if "think" in name or "tool" in name}
        self.stop, self.never = stop, sorted(set(range(len(ranks), len(ranks) + 256)) - spoken)

    def answer(self, prompt: str, images: list[bytes]) -> tuple[str, str]:
        """Greedy text after `prompt`, in which each {} stands for the pads of one image.

        A random model may open a thought in the middle: what follows <think> is the second string.
        """
        patches, grids = zip(*map(patchify, images), strict=True) if images else ((), ())
        pads = ["<|media_pad|>" * (h * w // 4) for _, h, w in grids]
        input_ids = torch.tensor([self.encoding.encode(prompt.format(*pads), allowed_special="all")])
        pictures: dict[str, Any] = {}
        if images:
            pictures = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=sorted(self.stop),
            pad_token_id=self.special["[PAD]"],
            suppress_tokens=self.never,
            **pictures,
        )
        ids = [token for token in output[0, input_ids.shape[1] :].tolist() if token not in self.stop]
        text, _, thought = self.encoding.decode_bytes(ids).decode(errors="replace").partition("<think>")
        return text, thought


def patchify(image: bytes) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Small images only: they are padded, never resized."""
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    height, width = (-(-side // 28) * 28 for side in pixels.shape[:2])
    canvas = np.zeros((height, width, 3), np.uint8)
    canvas[: pixels.shape[0], : pixels.shape[1]] = pixels
    values = (torch.from_numpy(canvas).float() / 255 - 0.5) / 0.5
    h, w = height // 14, width // 14
    return values.view(h, 14, w, 14, 3).permute(0, 2, 4, 1, 3).reshape(h * w, 3, 14, 14), (1, h, w)


@pytest.fixture(scope="module")
def oracle(tiny_k25: Path) -> Oracle:
    return Oracle(tiny_k25)


GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS, "thinking": False}


def texts(answer: dict[str, Any]) -> tuple[str, str]:
    return answer["text_output"].decode(), answer["reasoning_output"].decode()


def test_text_only(oracle: Oracle, caller: Any) -> None:
    expected = oracle.answer(USER.format("Tell me a story") + ANSWER, [])
    assert texts(caller.unary("Tell me a story", **GREEDY)) == expected
    assert len(expected[0]) > 10


@pytest.mark.parametrize("size", [(56, 56), (90, 130), (224, 100)])
def test_one_image(size: tuple[int, int], oracle: Oracle, caller: Any, png: Any) -> None:
    image = png(*size, seed=size[0])
    expected = oracle.answer(USER.format(MEDIA + "What is this?") + ANSWER, [image])
    assert texts(caller.unary("What is this?", [image], **GREEDY)) == expected
    assert caller.ask("What is this?", [image], stream=True, **GREEDY).text == expected[0]


def test_three_images_between_words_with_history(oracle: Oracle, caller: Any, png: Any) -> None:
    images = [png(56, 84, seed=1), png(28, 28, seed=2), png(130, 57, seed=3)]
    picture = {"type": "image"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "First:"}, picture]},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [picture, {"type": "text", "text": "and"}, picture, {"type": "text", "text": "?"}]},
    ]
    prompt = (
        SYSTEM.format("Be brief.")
        + USER.format("First:" + MEDIA)
        + "<|im_assistant|>assistant<|im_middle|><think></think>A picture.<|im_end|>"
        + USER.format(MEDIA + "and" + MEDIA + "?")
        + ANSWER
    )
    expected = oracle.answer(prompt, images)
    assert texts(caller.unary(None, images, messages, **GREEDY)) == expected
