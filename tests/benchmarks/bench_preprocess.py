# SPDX-License-Identifier: Apache-2.0
"""`make bench-preprocess`: decode, resize and patchify one JPEG, against vLLM's fused K2.5 processor."""

from __future__ import annotations

import io
import statistics
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from kimi_triton.demo.tiny import write_tiny_checkpoint
from kimi_triton.preprocess.pipeline import Preprocessor, PreprocessRequest
from tests.benchmarks.measure import VLLM_PYTHON, Peer, finish, interleaved, ratios, show, surroundings

SIZES = {"640x480": (640, 480), "1920x1080": (1920, 1080), "4000x3000": (4000, 3000)}
TURNS = 15


def main() -> None:
    vllm = Peer(VLLM_PYTHON, Path(__file__).with_name("vllm_peer.py"), "processor")
    vs_vllm, median_ms = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        preprocessor = Preprocessor.from_checkpoint(write_tiny_checkpoint(Path(folder) / "checkpoint"))
        for name, size in SIZES.items():
            file = Path(folder) / f"{name}.jpg"
            file.write_bytes(jpeg(*size))
            seconds = interleaved(
                {
                    "kimi-triton": lambda f=file: preprocessor.run(
                        PreprocessRequest(images=[f.read_bytes()], want_prompt=False)
                    ),
                    "vllm": lambda f=file: vllm.ask(str(f)),
                },
                TURNS,
            )
            show(name, seconds)
            vs_vllm[name] = round(ratios(seconds, "vllm", "kimi-triton"), 2)
            median_ms[name] = {who: round(statistics.median(values) * 1e3, 2) for who, values in seconds.items()}
    vllm.close()
    finish(vs_vllm=vs_vllm, median_ms=median_ms, **surroundings(vllm=vllm.about, turns=TURNS))


def jpeg(width: int, height: int) -> bytes:
    """Smooth seeded colours, as compressible as a photograph."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
