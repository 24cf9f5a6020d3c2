# SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: coverage-guided fuzzing of the parsers with atheris; prints executions and findings of each as JSON."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DONE = re.compile(r"Done (\d+) runs|stat::number_of_executed_units: (\d+)")


def fuzz(target: str, seconds: int, folder: Path) -> dict[str, object]:
    """One target in a process of its own; a finding's input stays in `folder`."""
    (folder / target).mkdir()
    command = [sys.executable, "-m", "tests.fuzz", "--one", target, "--seconds", str(seconds), "--folder", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = result.stdout + result.stderr
    runs = [int(match[1] or match[2]) for match in DONE.finditer(output)]
    findings = [str(file) for kind in ("crash", "timeout", "oom") for file in folder.glob(f"{target}-{kind}*")]
    if result.returncode:
        sys.stderr.write(output[-3000:])
    return {"executions": max(runs, default=0), "findings": findings, "exit": result.returncode}


def fuzz_one(target: str, seconds: int, folder: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["kimi_triton", "PIL"]):
        from tests.fuzz_targets import TARGETS, preprocessor
    function, seeds = TARGETS[target]
    preprocessor()
    for number, seed in enumerate(seeds()):
        (folder / target / f"seed-{number}").write_bytes(seed)
    flags = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"]
    atheris.Setup(["fuzz", *flags, f"-artifact_prefix={folder}/{target}-", str(folder / target)], function)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600, help="of all targets together")
    parser.add_argument("--one", help="run this target in this process")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        fuzz_one(arguments.one, arguments.seconds, arguments.folder)
    folder = Path(tempfile.mkdtemp(prefix="kimi-fuzz-"))
    targets = ("image", "messages", "options")
    results = {target: fuzz(target, max(1, arguments.seconds // len(targets)), folder) for target in targets}
    sys.stdout.write(json.dumps(results) + "\n")
    return int(any(result["exit"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
