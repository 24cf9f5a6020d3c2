# SPDX-License-Identifier: Apache-2.0
"""Where the steps of one server look up which requests are no longer wanted.

Triton tells no running step that the ensemble around it was cancelled, and the steps are processes of their own. They
share a folder in memory: a cancellation is one small file in it, named by the hash of the request's id. Whichever step
meets the request first renames the file, so that the poster learns what became of it. Nothing is locked or kept open,
so a process that is killed leaves at most a file, which the next poster removes when it is old.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from kimi_triton.errors import ConfigError
from kimi_triton.shared_path import shared_path

REMEMBERED_S = 60.0  # how long a cancellation waits for its request to come out of the queues before a step
MAX_FILES = 4096
POSTS_BETWEEN_SWEEPS = 64

_POSTED, _STOPPED, _ENDED = ".posted", ".stopped", ".ended"


class CancelBoard:
    """The cancellations of one server. Every method may be called from any process and thread."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, for this user alone. Raises ConfigError when it belongs to another one."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ConfigError(f"the folder for cancellations, {folder}, belongs to another user")
        self.folder = folder
        self._posts = 0

    @classmethod
    def of_repository(cls, repository: Path) -> CancelBoard:
        """The board of the servers of one model repository; all steps find it by the same name."""
        return cls(shared_path("cancel", repository))

    def post(self, request_id: str) -> None:
        """Ask every step to stop the request of this id, or to refuse it when it comes within a minute."""
        self._posts += 1
        if self._posts % POSTS_BETWEEN_SWEEPS == 1:
            self._sweep()
        draft = self._file(request_id, f".draft{os.getpid()}-{threading.get_ident()}")
        draft.write_bytes(_bytes(request_id))
        draft.replace(self._file(request_id, _POSTED))

    def is_posted(self, request_id: str) -> bool:
        """Whether the request of this id shall stop."""
        with suppress(FileNotFoundError):
            return time.time() - self._file(request_id, _POSTED).stat().st_mtime < REMEMBERED_S
        return False

    def posted_files(self) -> set[str]:
        """Names of what is on the board, for `posted_id`; cheap enough to look every few milliseconds."""
        return {name for name in os.listdir(self.folder) if name.endswith(_POSTED)}

    def posted_id(self, name: str) -> str | None:
        """The request id of a name on the board; None when it has gone from there."""
        with suppress(FileNotFoundError):
            return (self.folder / name).read_bytes().decode(errors="surrogateescape")
        return None

    def settle(self, request_id: str, was_running: bool) -> None:
        """Take a cancellation off the board because its request was stopped, or had ended before."""
        with suppress(FileNotFoundError):
            self._file(request_id, _POSTED).replace(self._file(request_id, _STOPPED if was_running else _ENDED))

    def outcome(self, request_id: str) -> bool | None:
        """What `settle` said, once; None when no step has met the request yet."""
        for suffix, was_running in ((_STOPPED, True), (_ENDED, False)):
            with suppress(FileNotFoundError):
                self._file(request_id, suffix).unlink()
                return was_running
        return None

    def remove(self) -> None:
        """Remove the folder, when its server has ended."""
        for file in self.folder.glob("*.*"):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _file(self, request_id: str, suffix: str) -> Path:
        return self.folder / (hashlib.sha256(_bytes(request_id)).hexdigest() + suffix)

    def _sweep(self) -> None:
        """Remove what is too old to matter, and the oldest of what is too much."""
        ages: list[tuple[float, Path]] = []
        for file in self.folder.glob("*.*"):
            with suppress(FileNotFoundError):
                ages.append((time.time() - file.stat().st_mtime, file))
        ages.sort()
        for place, (age, file) in enumerate(ages):
            if age >= REMEMBERED_S or place >= MAX_FILES:
                file.unlink(missing_ok=True)


def _bytes(request_id: str) -> bytes:
    return request_id.encode(errors="surrogateescape")  # an id may be any bytes
