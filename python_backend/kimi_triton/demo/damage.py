# SPDX-License-Identifier: Apache-2.0
"""Faults put into the way of a picture on purpose, to show that the accuracy test would notice them."""

from __future__ import annotations

import io
import queue
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as grpcclient
from PIL import Image
from safetensors.torch import load_file, save_file

from kimi_triton.demo.asking import MAX_TOKENS, Ask, png, text_input
from kimi_triton.demo.pictures import CELL


def with_images_swapped(ask: Ask) -> Ask:
    """The pictures of a question arrive in the opposite order."""
    return lambda question, images: ask(question, images[::-1])


def with_white_padding(ask: Ask) -> Ask:
    """Pictures are filled up to whole cells with white, where preprocessing would do it with black."""
    return lambda question, images: ask(question, [_padded_white(image) for image in images])


def _padded_white(image: bytes) -> bytes:
    picture = Image.open(io.BytesIO(image))
    canvas = Image.new("RGB", tuple(side + -side % CELL for side in picture.size), "white")  # type: ignore[arg-type]
    canvas.paste(picture)
    return png(canvas)


def write_without_positions(checkpoint: Path, folder: Path) -> Path:
    """A copy of a demo checkpoint in which the position table of the vision tower is all zeros."""
    shutil.copytree(checkpoint, folder)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        weights |= {name: torch.zeros_like(weights[name]) for name in weights if name.endswith("pos_emb.weight")}
        save_file(weights, path, metadata={"format": "pt"})
    return folder


def with_grid_swapped(grpc_url: str) -> Ask:
    """The three steps called one by one, with height and width of every grid mixed up between the first two."""
    client = grpcclient.InferenceServerClient(grpc_url)

    def ask(question: str, images: list[bytes]) -> str:
        inputs = [text_input("text_input", [question.encode()]), text_input("image", images)]
        first = client.infer("preprocess", inputs, parameters={"max_tokens": MAX_TOKENS})
        grids = first.as_numpy("image_grid_thw")[..., [0, 2, 1]]
        digests = first.as_numpy("image_digest") ^ 255  # else the encoder's cache would give the sound rows
        second = client.infer(
            "moonvit",
            [
                _tensor("pixel_values", first.as_numpy("pixel_values"), "UINT8"),
                _tensor("image_grid_thw", grids, "INT64"),
                _tensor("image_digest", digests, "UINT8"),
            ],
        )
        return _generate(
            grpc_url,
            [
                _tensor("input_ids", first.as_numpy("input_ids"), "INT32"),
                _tensor("generation", first.as_numpy("generation"), "BYTES"),
                _tensor("image_grid_thw", grids, "INT64"),
                _tensor("image_embeds", second.as_numpy("image_embeds"), "BF16"),
                _tensor("image_cached", second.as_numpy("image_cached"), "BOOL"),
            ],
        )

    return ask


def _tensor(name: str, value: Any, datatype: str) -> grpcclient.InferInput:
    return grpcclient.InferInput(name, list(value.shape), datatype).set_data_from_numpy(np.ascontiguousarray(value))


def _generate(grpc_url: str, inputs: list[grpcclient.InferInput]) -> str:
    """The text of the `llm` step, which streams."""
    events: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(grpc_url) as own:
        own.start_stream(callback=lambda result, error: events.put((result, error)))
        own.async_stream_infer("llm", inputs)
        result, error = events.get(timeout=60)
    if error is not None:
        raise error
    return str(result.as_numpy("text_output")[0].decode())
