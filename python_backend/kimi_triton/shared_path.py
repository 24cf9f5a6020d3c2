# SPDX-License-Identifier: Apache-2.0
"""Where the steps of one server, which are processes of their own, find what they share."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")


def shared_path(kind: str, repository: Path) -> Path:
    """A path in memory that all steps of the servers of one model repository agree on."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    name = hashlib.sha256(str(repository.resolve()).encode()).hexdigest()[:16]
    return parent / f"kimi_triton_{kind}_{os.getuid()}_{name}"
