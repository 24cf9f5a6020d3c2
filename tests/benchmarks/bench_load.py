# SPDX-License-Identifier: Apache-2.0
"""`make load`: a server of its own under load from perf_analyzer, 60 s each with 1, 4 and 16 requests in flight.

The last line is the summary; the exit code tells whether every request was answered and the server counted the same.
Without a checkpoint a tiny one with random weights is served.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from kimi_triton.demo.tiny import write_tiny_checkpoint
from kimi_triton.serve.launch import launch
from kimi_triton.serve.options import ServeOptions

MIX = ["--image-sizes", "224x224:2,320x240:1", "--images-per-request", "0:1,1:4,2:1", "--repeat-rate", "0.3"]


def main(output: Path, checkpoint: Path | None, seconds: float) -> int:
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder)
        served = checkpoint or write_tiny_checkpoint(run_folder / "checkpoint")
        options = ServeOptions(
            checkpoint=served, dtype="float32", http_port=0, grpc_port=0, metrics_port=0, log_file=output / "server.log"
        )
        with launch(options, run_folder) as server:
            urls = ["--grpc", server.grpc_url, "--http", server.http_url, "--metrics", server.metrics_url]
            load = ["--concurrency", "1,4,16", "--seconds", f"{seconds:g}", "--max-tokens", "16", "--out", str(output)]
            command = [sys.executable, "-m", "kimi_client", "load", *urls, *load, *MIX]
            return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder for report.html, result.json, result.csv and server.log")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    sys.exit(main(arguments.output, arguments.checkpoint, arguments.seconds))
