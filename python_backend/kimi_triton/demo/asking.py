# SPDX-License-Identifier: Apache-2.0
"""Ask a running server over gRPC."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from PIL import Image

from kimi_triton.demo.questions import Exercise

Ask = Callable[[str, list[bytes]], str]  # (question, encoded pictures) -> answer
AT_ONCE = 8
MAX_TOKENS = 64


def asker(client: grpcclient.InferenceServerClient, thinking: bool | None = None) -> Ask:
    """Questions to `kimi_vl_unary`; None leaves `thinking` to the server's default."""
    options = {"max_tokens": MAX_TOKENS} | ({} if thinking is None else {"thinking": thinking})

    def ask(question: str, images: list[bytes]) -> str:
        inputs = [text_input("text_input", [question.encode()]), text_input("image", images)]
        result = client.infer("kimi_vl_unary", inputs, parameters=options)
        return str(result.as_numpy("text_output")[0].decode())

    return ask


def ask_all(ask: Ask, exercises: Sequence[Exercise]) -> list[str]:
    """Answers in the order of the exercises, several asked at once."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda exercise: ask(exercise.question, encoded_pictures(exercise)), exercises))


def encoded_pictures(exercise: Exercise) -> list[bytes]:
    return [png(picture.image) for picture in exercise.pictures]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def text_input(name: str, elements: list[bytes]) -> grpcclient.InferInput:
    """A BYTES input of one dimension."""
    array: npt.NDArray[np.object_] = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return grpcclient.InferInput(name, [len(elements)], "BYTES").set_data_from_numpy(array)
