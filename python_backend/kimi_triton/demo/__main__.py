# SPDX-License-Identifier: Apache-2.0
"""`make demo`: start a real server, ask it about a picture over HTTP and over a gRPC stream, stop it."""

from __future__ import annotations

import argparse
import base64
import json
import queue
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from PIL import Image, ImageDraw

from kimi_triton.demo.tiny import write_tiny_checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.serve.launch import launch
from kimi_triton.serve.options import ServeOptions
from kimi_triton.serve.server import TritonServer

OUTPUT = Path("demo-output")
QUESTION = "What is in this picture?"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kimi_triton.demo", description=__doc__)
    parser.add_argument(
        "image", nargs="?", type=Path, help="a picture of yours; without one, a drawn picture is asked about"
    )
    picture = parser.parse_args().image or draw_picture(OUTPUT / "shapes.png")
    try:
        with tempfile.TemporaryDirectory(prefix="kimi-demo-") as folder:
            checkpoint = write_tiny_checkpoint(Path(folder) / "checkpoint")
            options = ServeOptions(checkpoint=checkpoint, http_port=0, grpc_port=0, metrics_port=0)
            say("starting Triton ...")
            with launch(options, Path(folder)) as server:
                ask(server, picture)
    except ConfigError as exc:
        sys.stderr.write(f"demo: {exc}\n")
        return 1
    return 0


def draw_picture(path: Path) -> Path:
    """A red circle and a blue square on white, as a PNG that one can look at."""
    path.parent.mkdir(exist_ok=True)
    picture = Image.new("RGB", (224, 168), "white")
    pen = ImageDraw.Draw(picture)
    pen.ellipse((20, 44, 100, 124), fill="red")
    pen.rectangle((124, 44, 204, 124), fill="blue")
    picture.save(path)
    return path


def ask(server: TritonServer, picture: Path) -> None:
    """The same question over HTTP, answered at once, and over gRPC, answered in pieces."""
    say(f"picture:  {picture}\nquestion: {QUESTION}")
    say(f"HTTP:     {generate(server.http_url, picture)!r}")
    sys.stdout.write("gRPC:     ")
    for piece in stream(server.grpc_url, picture):
        sys.stdout.write(piece)
        sys.stdout.flush()
    say("")


def generate(http_url: str, picture: Path) -> str:
    """POST to `/generate`, as curl would."""
    image = base64.b64encode(picture.read_bytes()).decode()
    body = {"text_input": QUESTION, "image": [image], "max_tokens": 16, "temperature": 0, "thinking": False}
    request = urllib.request.Request(f"http://{http_url}/v2/models/kimi_vl/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    if "error" in answer:  # /generate reports errors of the model with status 200
        raise ConfigError(answer["error"])
    return str(answer["text_output"])


def stream(grpc_url: str, picture: Path) -> Iterator[str]:
    """The pieces of the answer as they come."""
    events: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(grpc_url) as client:
        client.start_stream(callback=lambda result, error: events.put((result, error)))
        inputs = [bytes_input("text_input", QUESTION.encode()), bytes_input("image", picture.read_bytes())]
        options = {"stream": True, "max_tokens": 16, "temperature": 0, "thinking": False}
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


def bytes_input(name: str, value: bytes) -> grpcclient.InferInput:
    return grpcclient.InferInput(name, [1], "BYTES").set_data_from_numpy(np.array([value], dtype=np.object_))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
