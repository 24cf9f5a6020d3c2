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
from importlib import metadata
from pathlib import Path

from kimi_client.errors import KimiClientError

# What is needed: a wheel, part of a file's path in it, and the name under which the file is looked for.
PIECES = (
    ("tritonclient==2.50.0", "/perf_analyzer", "perf_analyzer"),
    ("nvidia-pytriton==0.7.0", "/libb64-", "libb64.so.0d"),
    ("nvidia-pytriton==0.7.0", "/libcudart-", "libcudart.so.12"),
)


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
    """Fill `folder` from the two wheels, where they are installed or else by pip.

    Raises KimiClientError where the result does not run, CalledProcessError where pip cannot get a wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        for requirement, part, name in PIECES:
            installed = _installed(requirement, part)
            content = installed.read_bytes() if installed else _from_wheel(requirement, part, Path(downloads))
            (folder / name).write_bytes(content)
    (folder / "perf_analyzer").chmod(0o755)
    fetched = PerfAnalyzer(folder / "perf_analyzer", folder)
    if not fetched.runs():
        raise KimiClientError(f"the perf_analyzer of {PIECES[0][0]} does not run on this machine")
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


def _installed(requirement: str, part: str) -> Path | None:
    name, _, version = requirement.partition("==")
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in found.files or () if part in f"/{file}"]
    return next((path for path in paths if path.exists()), None) if found.version == version else None


def _from_wheel(requirement: str, part: str, downloads: Path) -> bytes:
    folder = downloads / requirement
    if not folder.exists():
        platforms = ["--platform", "manylinux1_x86_64", "--platform", "manylinux_2_35_x86_64"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", *platforms, "--dest", str(folder), requirement], check=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        (name,) = [name for name in wheel.namelist() if part in name]
        return wheel.read(name)


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
