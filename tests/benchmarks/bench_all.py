# SPDX-License-Identifier: Apache-2.0
"""`make bench`: run every vision benchmark in turn and write their figures as JSON and as one HTML page with plots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import ROOT
from tests.benchmarks.plots import bars, lines, page

# name of the benchmark -> whether it needs the full-size checkpoint
BENCHMARKS = {"encoder": True, "preprocess": False, "overhead": True, "cache": True, "scaling": True}
BARS = {
    "encoder.vs_transformers": {"1x1024": 1.8, "1x4096": 2.3, "4x256": 1.6},
    "encoder.vs_vllm": {"1x1024": 1.4, "1x4096": 2.1, "4x256": 1.2},
    "preprocess.vs_vllm": {"640x480": 5.0, "1920x1080": 5.0, "4000x3000": 1.8},
}


def main(checkpoint: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    results = {name: run(name, checkpoint if needs_weights else None) for name, needs_weights in BENCHMARKS.items()}
    (output / "bench.json").write_text(json.dumps(results, indent=2))
    (output / "bench.html").write_text(html(results))
    print(f"wrote {output / 'bench.html'}")
    print(json.dumps(results))


def run(name: str, checkpoint: Path | None) -> dict[str, Any]:
    """Run one benchmark, passing its output on; its last line is the result."""
    command = [sys.executable, "-m", f"tests.benchmarks.bench_{name}", *([str(checkpoint)] if checkpoint else [])]
    print(f"== {name}", flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    if process.returncode:
        raise SystemExit(f"bench_{name} ended with code {process.returncode}")
    result: dict[str, Any] = json.loads(last)
    return result


def html(results: dict[str, Any]) -> str:
    plots = []
    for key, wanted in BARS.items():
        benchmark, field = key.split(".")
        plots.append(
            bars(f"{benchmark}: times as fast, {field.replace('vs_', 'against ')}", results[benchmark][field], wanted)
        )
    plots.append(bars("share of the matrix-product peak", results["encoder"]["peak_fraction"], {}))
    for field, axis in (("images", "images of 256 patches"), ("patches", "patches of one image")):
        measured = results["scaling"][field]
        for value, unit in (("seconds", "s"), ("peak_mib_above_weights", "MiB")):
            points = {float(count): figures[value] for count, figures in measured.items()}
            plots.append(lines(f"{value} [{unit}] over {axis}", points))
    singles = {
        "server over process, 1,024 patches (bar 1.05)": results["overhead"]["server_over_process"],
        "overhead at 64 patches, ms (bar 6)": results["overhead"]["small_overhead_ms"],
        "repeated image over first (bar 0.05)": results["cache"]["repeat_over_first"],
    }
    return page("kimi-triton: vision benchmarks", plots, singles, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
