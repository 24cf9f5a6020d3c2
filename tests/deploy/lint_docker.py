# SPDX-License-Identifier: Apache-2.0
"""Check docker/ with the linters made for it; `make lint-docker` runs this in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml
from compose_spec import ComposeSpecification

DOCKER = Path(__file__).parents[2] / "docker"

if __name__ == "__main__":
    hadolint = Path(sys.executable).parent / "hadolint"
    subprocess.run([hadolint, DOCKER / "Dockerfile"], check=True)
    ComposeSpecification(**yaml.safe_load((DOCKER / "compose.yaml").read_text()))
