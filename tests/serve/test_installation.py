# SPDX-License-Identifier: Apache-2.0
"""Finding a server, and the sentences for machines that have none that runs."""

from __future__ import annotations

import platform
import stat
from pathlib import Path

import pytest

from kimi_triton.errors import ConfigError
from kimi_triton.serve import installation


def test_the_wheel_is_laid_out_with_the_stub_of_this_python(tmp_path: Path) -> None:
    found = installation.find_server(tmp_path)
    assert found.version == (2, 51)
    assert found.backend_directory is not None
    assert (found.backend_directory / "python" / "triton_python_backend_stub").stat().st_mode & stat.S_IXUSR
    assert any((folder / f"libpython{installation.PYTHON}.so.1.0").exists() for folder in found.library_path)


def test_a_server_on_path_wins_and_tells_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\necho 'tritonserver 2.60.1'\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = installation.find_server(tmp_path)
    assert (found.binary, found.version, found.backend_directory) == (binary, (2, 60), None)


def test_numpy_2_is_refused_for_an_old_server_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "distribution_version", lambda _: "2.1.0")
    with pytest.raises(ConfigError, match=r"Triton 2\.51 loses every output under NumPy 2\.1\.0"):
        installation.find_server(tmp_path)
    installation._check_numpy((2, 52))


@pytest.mark.parametrize(
    ("machine", "libc"), [("aarch64", ("glibc", "2.36")), ("x86_64", ("glibc", "2.31")), ("x86_64", ("", ""))]
)
def test_a_machine_without_a_fitting_server_hears_of_the_container(
    machine: str, libc: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    with pytest.raises(ConfigError, match=r"x86-64 Linux with glibc 2\.35 or newer.*container"):
        installation.find_server(tmp_path)


def test_a_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install nvidia-pytriton"):
        installation.find_server(tmp_path)


def test_a_missing_libpython_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation.sysconfig, "get_config_var", lambda _: str(tmp_path))
    monkeypatch.setattr(installation.ctypes.util, "find_library", lambda _: None)
    with pytest.raises(ConfigError, match=r"libpython3\.\d+\.so\.1\.0 is missing.*apt-get install"):
        installation.find_server(tmp_path)
