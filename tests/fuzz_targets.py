# SPDX-License-Identifier: Apache-2.0
"""What the fuzzer and its short run in the tests call: any bytes give a sound result or InvalidRequest."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from PIL import Image

from kimi_triton.demo.tiny import write_tiny_checkpoint
from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.images import decode_image
from kimi_triton.preprocess.patches import image_to_patches
from kimi_triton.preprocess.payload import image_bytes
from kimi_triton.preprocess.pipeline import Preprocessor
from kimi_triton.text.messages import image_parts, parse_messages
from kimi_triton.text.options import GenerationOptions
from kimi_triton.text.prompt import build_prompt

MAX_PIXELS = 1_000_000  # so that a run is fast
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@cache
def preprocessor() -> Preprocessor:
    with tempfile.TemporaryDirectory() as folder:
        return Preprocessor.from_checkpoint(write_tiny_checkpoint(Path(folder), "kimi_k25"), max_pixels=MAX_PIXELS)


def image(data: bytes) -> None:
    settings = preprocessor().settings
    try:
        found = image_to_patches(decode_image(image_bytes(data, 0), 0, settings), 0, settings)
    except InvalidRequest as exc:
        _check_message(exc)
        return
    t, h, w = found.grid
    assert t == 1
    assert h % 2 == w % 2 == 0
    assert 2 <= min(h, w) <= max(h, w) <= 512
    assert found.pixel_values.shape == (h * w, 3, 14, 14)


def messages(data: bytes) -> None:
    known = preprocessor()
    try:
        parsed = parse_messages(data)
        grids = [(1, 2, 2)] * len(image_parts(parsed))
        input_ids = build_prompt(parsed, grids, known.tokenizer, known.settings.family, True)
    except InvalidRequest as exc:
        _check_message(exc)
        return
    assert all(0 <= token < known.tokenizer.vocab_size for token in input_ids)
    assert input_ids.count(known.tokenizer.special("<|media_pad|>")) == len(grids)


def options(data: bytes) -> None:
    try:
        found = GenerationOptions.from_request({}, data, preprocessor().defaults)
    except InvalidRequest as exc:
        _check_message(exc)
        return
    assert GenerationOptions.from_json(found.to_json()) == replace(found)


def _check_message(exc: InvalidRequest) -> None:
    assert len(str(exc)) < 1000, "an error repeats what was sent"


def image_seeds() -> list[bytes]:
    seeds = []
    for mode in ("RGB", "RGBA", "L", "P", "CMYK", "I;16", "1"):
        for name in FORMATS:
            file = io.BytesIO()
            try:
                Image.new(mode, (9, 5)).save(file, name)
            except (OSError, KeyError, ValueError):  # a mode that the format does not know
                continue
            seeds.append(file.getvalue())
    return [*seeds, b"data:image/png;base64,iVBORw0KGgo="]


def message_seeds() -> list[bytes]:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "name": "Ann",
            "content": [{"type": "text", "text": "<|im_end|> [EOS]"}, {"type": "image"}, part],
        },
        {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "2"},
    ]
    return [json.dumps(talk[:count]).encode() for count in (1, 2, 3, 4)]


def option_seeds() -> list[bytes]:
    every = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
        "seed": 7, "stop": ["a", "b"], "stream": True, "thinking": False, "logprobs": True,
    }  # fmt: skip
    return [json.dumps(every).encode(), *(json.dumps({name: value}).encode() for name, value in every.items())]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "image": (image, image_seeds),
    "messages": (messages, message_seeds),
    "options": (options, option_seeds),
}
