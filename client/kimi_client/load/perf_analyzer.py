# SPDX-License-Identifier: Apache-2.0
"""Finds a perf_analyzer that runs here; `python -m kimi_client.load.perf_analyzer` fetches one where there is none.

The current wheel wants glibc 2.38. The one inside the tritonclient 2.50.0 wheel runs on older systems, but links to
libb64 and libcudart, which the nvidia-pytriton wheel carries under other names. What is fetched goes into a folder of
the user's cache, with the two libraries beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kimi_client.errors import KimiClientError

BINARY_WHEEL = "tritonclient==2.50.0"
LIBRARY_WHEEL = "nvidia-pytriton==0.7.0"
LIBRARIES = {
    "libb64-": "libb64.so.0d",
    "libcudart-": "libcudart.so.12",
}  # start of its name there -> name that is linked


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """A perf_analyzer that answers `--version`, and the environment it needs."""

    path: Path
    library_folder: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment to run it in."""
        if self.library_folder is None:
            return dict(os.environ)
        folders = [str(self.library_folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(folders)}

    def runs(self) -> bool:
        """Whether it starts at all: a binary for a newer system does not."""
        try:
            command = [str(self.path), "--version"]
            return subprocess.run(command, env=self.environment, capture_output=True, timeout=30).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def find_perf_analyzer() -> PerfAnalyzer:
    """Return the first that runs: on PATH, beside this interpreter, or fetched earlier; else KimiClientError."""
    for candidate in _candidates():
        if candidate.path.exists() and candidate.runs():
            return candidate
    raise KimiClientError(
        "no perf_analyzer runs on this machine; fetch one with `python -m kimi_client.load.perf_analyzer`"
    )


def fetch_perf_analyzer(folder: Path) -> PerfAnalyzer:
    """Fill `folder` from the two wheels, by pip; raises KimiClientError where the result does not run."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        with zipfile.ZipFile(_download(BINARY_WHEEL, Path(downloads))) as wheel:
            _extract(wheel, "/perf_analyzer", folder / "perf_analyzer")
        (folder / "perf_analyzer").chmod(0o755)
        with zipfile.ZipFile(_download(LIBRARY_WHEEL, Path(downloads))) as wheel:
            for start, name in LIBRARIES.items():
                _extract(wheel, f"/{start}", folder / name)
    fetched = PerfAnalyzer(folder / "perf_analyzer", folder)
    if not fetched.runs():
        raise KimiClientError(f"the perf_analyzer of {BINARY_WHEEL} does not run on this machine")
    return fetched


def cache_folder() -> Path:
    """Return the folder that a fetched perf_analyzer lives in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kimi-client" / "perf_analyzer-2.50.0"


def _candidates() -> Iterator[PerfAnalyzer]:
    beside = [shutil.which("perf_analyzer"), str(Path(sys.executable).parent / "perf_analyzer")]
    paths = [Path(path) for path in beside if path]
    yield from (PerfAnalyzer(path) for path in paths)
    # The libraries of the fetched one also serve one that is installed without them.
    yield from (PerfAnalyzer(path, cache_folder()) for path in [*paths, cache_folder() / "perf_analyzer"])


def _download(requirement: str, folder: Path) -> Path:
    target = folder / requirement.split("==")[0]
    platforms = ["--platform", "manylinux1_x86_64", "--platform", "manylinux_2_35_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--only-binary=:all:", *platforms, "--dest", str(target), requirement], check=True)
    (wheel,) = target.glob("*.whl")
    return wheel


def _extract(wheel: zipfile.ZipFile, part: str, target: Path) -> None:
    (name,) = [name for name in wheel.namelist() if part in name]
    target.write_bytes(wheel.read(name))


def main() -> int:
    """Fetch, unless one runs already."""
    try:
        found = find_perf_analyzer()
    except KimiClientError:
        try:
            found = fetch_perf_analyzer(cache_folder())
        except (KimiClientError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"kimi-client: {error}\n")
            return 1
    sys.stdout.write(f"{found.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
