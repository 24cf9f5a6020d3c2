# SPDX-License-Identifier: Apache-2.0
"""Ask a server about held-out pictures and mark its answers: `python -m kimi_triton.demo.accuracy`.

Without --grpc-url a server of the demo model is started for it. The last line is JSON: the shares of right `digits`,
`numbers`, `shapes` and `multi_image` answers, the share of answers on which transformers agrees, and the pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tritonclient.grpc as grpcclient

from kimi_triton.demo import CHECKPOINT
from kimi_triton.demo.asking import ask_all, asker
from kimi_triton.demo.exam import held_out_exercises, marks
from kimi_triton.demo.oracle import TransformersModel
from kimi_triton.serve.launch import launch
from kimi_triton.serve.options import ServeOptions

NUM_QUESTIONS = 400


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kimi_triton.demo.accuracy", description=__doc__)
    parser.add_argument("--grpc-url", help="host:port of a running server of the demo model")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--questions", type=int, default=NUM_QUESTIONS)
    arguments = parser.parse_args()
    exercises = held_out_exercises(arguments.questions)
    with _server(arguments.grpc_url, arguments.checkpoint) as url, grpcclient.InferenceServerClient(url) as client:
        answers = ask_all(asker(client), exercises)
    expected = TransformersModel(arguments.checkpoint).answers(exercises)
    for exercise, answer, other in zip(exercises, answers, expected, strict=True):
        if answer != exercise.answer or answer != other:
            sys.stdout.write(f"{exercise.question} {exercise.answer!r}: server {answer!r}, transformers {other!r}\n")
    result = marks(exercises, answers) | {
        "agreement": round(sum(map(str.__eq__, answers, expected)) / len(answers), 4),
        "pictures": sum(len(exercise.pictures) for exercise in exercises),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


@contextmanager
def _server(url: str | None, checkpoint: Path) -> Iterator[str]:
    if url is not None:
        yield url
        return
    options = ServeOptions(checkpoint=checkpoint, http_port=0, grpc_port=0, metrics_port=0)
    with tempfile.TemporaryDirectory(prefix="kimi-accuracy-") as folder, launch(options, Path(folder)) as server:
        yield server.grpc_url


if __name__ == "__main__":
    sys.exit(main())
