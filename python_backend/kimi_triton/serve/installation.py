# SPDX-License-Identifier: Apache-2.0
"""Find a Triton server: `tritonserver` on PATH or of an NGC image, else the one inside the nvidia-pytriton wheel."""

from __future__ import annotations

import ctypes.util
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import version as distribution_version
from pathlib import Path

from kimi_triton.errors import ConfigError

NGC_BINARY = Path("/opt/tritonserver/bin/tritonserver")
WHEEL_SERVER_VERSION = (2, 51)  # inside nvidia-pytriton 0.5.13 to 0.7.0
WHEEL_MIN_GLIBC = (2, 35)
FIRST_WITH_NUMPY_2 = (2, 52)
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInstallation:
    """A server that can be started. `backend_directory` is None where the server knows its own."""

    binary: Path
    version: tuple[int, int]
    backend_directory: Path | None = None
    library_path: tuple[Path, ...] = ()


def find_server(run_folder: Path) -> ServerInstallation:
    """The server to start; parts of the wheel's one are laid out in `run_folder`. Raises ConfigError."""
    found = shutil.which("tritonserver")
    if found or NGC_BINARY.exists():
        binary = Path(found) if found else NGC_BINARY
        installation = ServerInstallation(binary=binary, version=_ask_version(binary))
    else:
        installation = _from_wheel(run_folder)
    _check_numpy(installation.version)
    return installation


def _from_wheel(run_folder: Path) -> ServerInstallation:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "no Triton server found: install the one for this machine with `pip install nvidia-pytriton==0.7.0`, "
            "or run inside an NGC tritonserver container"
        )
    _check_platform()
    site = Path(spec.origin).parents[1]
    server = site / "pytriton" / "tritonserver"
    stub = server / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        raise ConfigError(
            f"the server in nvidia-pytriton has no stub for Python {PYTHON}; use Python 3.10, 3.11 or 3.12"
        )
    backends = run_folder / "backends"
    shutil.copytree(server / "backends", backends, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(stub, backends / "python")
    return ServerInstallation(
        binary=server / "bin" / "tritonserver",
        version=WHEEL_SERVER_VERSION,
        backend_directory=backends,
        library_path=(site / "nvidia_pytriton.libs", _libpython_folder()),
    )


def _check_platform() -> None:
    libc, release = platform.libc_ver()
    found = tuple(int(part) for part in release.split(".")[:2]) if libc == "glibc" else (0, 0)
    if sys.platform != "linux" or platform.machine() != "x86_64" or found < WHEEL_MIN_GLIBC:
        raise ConfigError(
            f"the server in nvidia-pytriton needs x86-64 Linux with glibc 2.35 or newer, this is {sys.platform} "
            f"{platform.machine()} with {libc or 'no glibc'} {release}; run inside an NGC tritonserver container"
        )


def _libpython_folder() -> Path:
    """Where the stub finds libpython: beside the interpreter, or where the loader looks anyway."""
    name = f"libpython{PYTHON}.so.1.0"
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    if (folder / name).exists():
        return folder
    if ctypes.util.find_library(f"python{PYTHON}"):
        return folder
    raise ConfigError(
        f"{name} is missing, Triton's Python stub needs it: install it (Debian: apt-get install libpython{PYTHON}) "
        "or run inside an NGC tritonserver container"
    )


def _ask_version(binary: Path) -> tuple[int, int]:
    result = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60, check=False)
    match = re.search(r"(\d+)\.(\d+)\.\d+", result.stdout + result.stderr)
    if match is None:
        raise ConfigError(f"{binary} --version does not tell a version: {(result.stdout + result.stderr)[:200]!r}")
    return int(match[1]), int(match[2])


def _check_numpy(version: tuple[int, int]) -> None:
    """Older stubs silently send every output empty when the interpreter has NumPy 2."""
    numpy = distribution_version("numpy")
    if version < FIRST_WITH_NUMPY_2 and int(numpy.split(".")[0]) >= 2:
        raise ConfigError(
            f"Triton {version[0]}.{version[1]} loses every output under NumPy {numpy}; run `pip install 'numpy<2'`"
        )
