# SPDX-License-Identifier: Apache-2.0
"""Embeddings in a safetensors file, written picture by picture so that any number of them fits in memory.

The format: the length of a JSON header (8 bytes little-endian), the header with each tensor's type, shape and place,
then the bytes. The header comes first but is known last, so room is left for it; spaces may fill what is not needed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Self

_WIDEST = 1 << 62  # as long, in digits, as any offset or row count


class EmbedsFile:
    """A file in the making. It appears under its own name only when the block ends without an error."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._entries: dict[str, Any] = {}
        self._written = 0
        self._room = len(_header({name: _entry((_WIDEST, _WIDEST), _WIDEST, _WIDEST) for name in names}))
        self._file = self._part.open("wb")
        self._file.seek(8 + self._room)

    def add(self, name: str, embeds: NDArray[np.float32]) -> None:
        """Write one picture's rows (num_image_tokens, hidden) as BF16, the type the server made them in."""
        halves = (np.ascontiguousarray(embeds).view(np.uint32) >> 16).astype("<u2")
        start, self._written = self._written, self._written + halves.nbytes
        self._entries[name] = _entry(embeds.shape, start, self._written)
        self._file.write(halves.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file:
            self._file.seek(0)
            self._file.write(struct.pack("<Q", self._room) + _header(self._entries).ljust(self._room))
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink()


def _entry(shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}


def _header(entries: dict[str, Any]) -> bytes:
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return text.ljust(-(-len(text) // 8) * 8)  # so that the tensors begin at a multiple of 8 bytes
