# SPDX-License-Identifier: Apache-2.0
"""`make demo`: start a real server of the demo model and ask it about pictures, or about yours (IMAGE=path).

The pictures lie in demo-output/ afterwards. Their digits are scans that training has not seen.
"""

from __future__ import annotations

import argparse
import base64
import json
import queue
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpcclient
from PIL import Image, ImageOps

from kimi_triton.demo import CHECKPOINT
from kimi_triton.demo.asking import MAX_TOKENS, text_input
from kimi_triton.demo.exam import held_out_exercises
from kimi_triton.errors import ConfigError
from kimi_triton.serve.launch import launch
from kimi_triton.serve.options import ServeOptions

OUTPUT = Path("demo-output")
NUM_QUESTIONS = 8
SEED = 5
TRAINED_SIDE = 224  # pixels; the model has seen no digit that is larger than about 45 of them
YOUR_QUESTIONS = ("What number is this?", "What is in this picture?", "How many shapes are there?")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kimi_triton.demo", description=__doc__)
    parser.add_argument("image", nargs="?", type=Path, help="a picture of yours to ask about")
    image = parser.parse_args().image
    try:
        OUTPUT.mkdir(exist_ok=True)
        questions = drawn_questions() if image is None else your_questions(image)
        options = ServeOptions(checkpoint=CHECKPOINT, http_port=0, grpc_port=0, metrics_port=0)
        say("starting Triton ...\n")
        with tempfile.TemporaryDirectory(prefix="kimi-demo-") as folder, launch(options, Path(folder)) as server:
            for question, pictures, expected in questions:
                ask(server.grpc_url, question, pictures, expected)
            question, pictures, _ = questions[0]
            say(f"\nThe first question over HTTP instead of gRPC: {generate(server.http_url, question, pictures)}")
        say(f"The pictures are in {OUTPUT}/.")
    except (ConfigError, OSError) as exc:
        sys.stderr.write(f"demo: {exc}\n")
        return 1
    return 0


def drawn_questions() -> list[tuple[str, list[Path], str | None]]:
    """(question, pictures written as PNG, right answer)."""
    questions: list[tuple[str, list[Path], str | None]] = []
    for number, exercise in enumerate(held_out_exercises(NUM_QUESTIONS, SEED), 1):
        letters = "abc" if len(exercise.pictures) > 1 else ("",)
        paths = [OUTPUT / f"{number}{letter}.png" for letter, _ in zip(letters, exercise.pictures, strict=False)]
        for path, picture in zip(paths, exercise.pictures, strict=True):
            picture.image.save(path)
        questions.append((exercise.question, paths, exercise.answer))
    return questions


def your_questions(path: Path) -> list[tuple[str, list[Path], str | None]]:
    """The picture is made as small as those the model was trained with."""
    picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    picture.thumbnail((TRAINED_SIDE, TRAINED_SIDE), Image.Resampling.BICUBIC)
    small = OUTPUT / "yours.png"
    picture.save(small)
    return [(question, [small], None) for question in YOUR_QUESTIONS]


def ask(grpc_url: str, question: str, pictures: list[Path], expected: str | None) -> None:
    """Print the answer as it comes."""
    sys.stdout.write(f"{' '.join(map(str, pictures)):<60} {question} ")
    answer = ""
    for piece in stream(grpc_url, question, [path.read_bytes() for path in pictures]):
        answer += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    say("" if expected in (None, answer) else f"  (wrong: it is {expected})")


def generate(http_url: str, question: str, pictures: list[Path]) -> str:
    """The whole answer at once from POST `/generate`, which is what curl would get."""
    images = [base64.b64encode(path.read_bytes()).decode() for path in pictures]
    body = json.dumps({"text_input": question, "image": images, "max_tokens": MAX_TOKENS}).encode()
    try:
        with urllib.request.urlopen(f"http://{http_url}/v2/models/kimi_vl/generate", body, timeout=60) as response:
            return str(json.load(response)["text_output"])
    except urllib.error.HTTPError as exc:
        raise ConfigError(exc.read().decode(errors="replace")) from exc


def stream(grpc_url: str, question: str, images: list[bytes]) -> Iterator[str]:
    """The pieces of the answer as they come."""
    events: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(grpc_url) as client:
        client.start_stream(callback=lambda result, error: events.put((result, error)))
        inputs = [text_input("text_input", [question.encode()]), text_input("image", images)]
        options = {"stream": True, "max_tokens": MAX_TOKENS}
        client.async_stream_infer("kimi_vl", inputs, parameters=options, enable_empty_final_response=True)
        while True:
            result, error = events.get(timeout=60)
            if error is not None:
                raise ConfigError(str(error))
            response = result.get_response()
            if response.outputs:
                yield result.as_numpy("text_output")[0].decode()
            if response.parameters["triton_final_response"].bool_param:
                return


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
