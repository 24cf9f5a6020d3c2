# SPDX-License-Identifier: Apache-2.0
"""`make bench-overhead`: `kimi_vision` through the server against the same work in one process, cache off."""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import tritonclient.grpc as grpcclient
from PIL import Image

from kimi_triton.preprocess.pipeline import Preprocessor, PreprocessRequest, PreprocessResult
from kimi_triton.serve.launch import launch
from kimi_triton.serve.options import ServeOptions
from kimi_triton.vision.encoder import LocalEncoder
from kimi_triton.vision.local import load_from_folder
from tests.benchmarks.full_size import write_full_size_checkpoint
from tests.benchmarks.measure import finish, interleaved, ratios, show, surroundings

WORK = {"1024 patches": (448, 448, 7), "64 patches": (112, 112, 41)}  # width, height, turns


class OneProcess:
    """Preprocessing and encoding by plain calls."""

    def __init__(self, checkpoint: Path) -> None:
        self.preprocessor = Preprocessor.from_checkpoint(checkpoint)
        device = torch.device("cpu")
        model = load_from_folder(checkpoint, device, "bfloat16", lambda _done, _total: None)
        self.encoder = LocalEncoder(model, device)

    def preprocess(self, image: bytes) -> PreprocessResult:
        return self.preprocessor.run(PreprocessRequest(images=[image], want_prompt=False))

    def embed(self, image: bytes) -> torch.Tensor:
        result = self.preprocess(image)
        grids = [tuple(grid) for grid in result.image_grid_thw.tolist()]
        (rows,) = self.encoder.encode([torch.from_numpy(result.pixel_values)], grids)
        return rows.bfloat16()


class ThroughServer:
    """One gRPC call of `kimi_vision`."""

    def __init__(self, grpc_url: str) -> None:
        self.client = grpcclient.InferenceServerClient(grpc_url)

    def embed(self, image: bytes) -> torch.Tensor:
        tensor = grpcclient.InferInput("image", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([image], dtype=np.object_))
        result = self.client.infer("kimi_vision", [tensor])
        return torch.from_numpy(result.as_numpy("image_embeds")[0])


def main(folder: Path) -> None:
    checkpoint = write_full_size_checkpoint(folder)
    process = OneProcess(checkpoint)
    options = ServeOptions(
        checkpoint=checkpoint, dtype="bfloat16", http_port=0, grpc_port=0, metrics_port=0, image_cache_bytes=0
    )
    with tempfile.TemporaryDirectory() as run_folder, launch(options, Path(run_folder)) as server:
        through_server = ThroughServer(server.grpc_url)
        measured = {}
        for name, (width, height, turns) in WORK.items():
            image = png(width, height)
            assert torch.equal(through_server.embed(image).float(), process.embed(image).float())
            seconds = interleaved(
                {"server": lambda i=image: through_server.embed(i), "process": lambda i=image: process.embed(i)}, turns
            )
            show(name, seconds)
            print_bytes(name, process.preprocess(image), through_server.embed(image))
            measured[name] = seconds
    small = measured["64 patches"]
    finish(
        server_over_process=round(ratios(measured["1024 patches"], "server", "process"), 4),
        small_overhead_ms=round((statistics.median(small["server"]) - statistics.median(small["process"])) * 1e3, 2),
        **surroundings(dtype="bfloat16", threads=torch.get_num_threads()),
    )


def print_bytes(name: str, result: PreprocessResult, rows: torch.Tensor) -> None:
    """What crosses each hop."""
    to_moonvit = result.pixel_values.nbytes + result.image_grid_thw.nbytes + result.image_digest.nbytes
    print(f"{name}: preprocess -> moonvit {to_moonvit} bytes, moonvit -> caller {rows.numel() * 2} bytes", flush=True)


def png(width: int, height: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
