# SPDX-License-Identifier: Apache-2.0
"""Remember the rows of images that were encoded before, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

Key = bytes


class EmbeddingCache:
    """image_embeds by image, least recently used ones forgotten first. Not thread-safe; its owner holds a lock.

    A key says everything that shapes the rows: digest of pixels, grid and processor settings, weights, dtype. Entries
    own their storage, so the bytes counted are the bytes held, and nobody may write into them.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_mismatches = 0  # hits with a wrong number of rows; always 0 unless an entry was damaged
        self._entries: OrderedDict[Key, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key, num_rows: int) -> Tensor | None:
        """The rows stored under `key`. An entry without exactly `num_rows` rows is dropped and not returned."""
        rows = self._entries.get(key)
        if rows is None:
            return None
        if len(rows) != num_rows:
            self.num_mismatches += 1
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return rows

    def put(self, key: Key, rows: Tensor) -> None:
        """Store `rows`, copied when they are a view of something larger. Rows above the whole budget are left out."""
        if rows.nbytes > self.max_bytes:
            return
        if key in self._entries:
            self._drop(key)
        self._entries[key] = rows if rows.untyped_storage().nbytes() == rows.nbytes else rows.clone()
        self.num_bytes += rows.nbytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        self.num_bytes -= self._entries.pop(key).nbytes
