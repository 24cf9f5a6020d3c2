# SPDX-License-Identifier: Apache-2.0
"""Encode each image once: remembered images are looked up, equal ones in flight are awaited."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kimi_triton.errors import KimiError
from kimi_triton.vision.cache import EmbeddingCache
from kimi_triton.vision.grids import Grid, num_image_tokens
from kimi_triton.vision.work_log import WorkLog

Encoded = Tensor | KimiError


class Encoder(Protocol):
    """Whatever turns images into rows: one model in this process, or a group of worker processes."""

    work_log: WorkLog

    @property
    def num_restarts(self) -> int:
        """How often worker processes were started again."""

    def encode(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> Sequence[Encoded]:
        """(t * h * w, 3, 14, 14) uint8 on the CPU for each image -> its rows, or its error, in order."""

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One image of a request. `key` stands for its pixels and its grid."""

    key: bytes
    pixel_values: Tensor  # (t * h * w, 3, 14, 14) uint8, on the CPU
    grid: Grid


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """`rows` (num_image_tokens, text_hidden_size) bfloat16 on the CPU; shared, so nobody may write into them."""

    rows: Encoded
    is_cached: bool  # it cost no encoding: remembered, or the same as one that is being encoded


class RememberingEncoder:
    """An encoder behind a cache. With a budget of 0 bytes every image is encoded, equal or not.

    Threads may call `encode` at the same time if the encoder behind it allows that.
    """

    def __init__(self, encoder: Encoder, scope: bytes, max_bytes: int) -> None:
        """`scope` is what images share and a key must tell apart: the weights and the dtype."""
        self._encoder = encoder
        self._scope = scope
        self.cache = EmbeddingCache(max_bytes)
        self._in_flight: dict[bytes, Future[Encoded]] = {}
        self._lock = threading.Lock()

    def encode(self, images: Sequence[Image]) -> list[EncodedImage]:
        """The rows or the error of each image, in order."""
        if not self.cache.max_bytes:
            return [EncodedImage(rows, False) for rows in self._encode(images)]
        awaited, mine = self._claim(images)
        self._fulfil([images[index] for index in sorted(mine)])
        return [EncodedImage(future.result(), index not in mine) for index, future in enumerate(awaited)]

    @property
    def work_log(self) -> WorkLog:
        return self._encoder.work_log

    @property
    def num_restarts(self) -> int:
        return self._encoder.num_restarts

    def stop(self) -> None:
        self._encoder.stop()

    def _claim(self, images: Sequence[Image]) -> tuple[list[Future[Encoded]], set[int]]:
        """A future for each image, and the indices of those that nobody encodes yet."""
        awaited: list[Future[Encoded]] = []
        mine: set[int] = set()
        with self._lock:
            for index, image in enumerate(images):
                key = self._scope + image.key
                future = self._in_flight.get(key)
                if future is None:
                    future = Future()
                    rows = self.cache.get(key, num_image_tokens(image.grid))
                    if rows is not None:
                        future.set_result(rows)
                    else:
                        self._in_flight[key] = future
                        mine.add(index)
                awaited.append(future)
        return awaited, mine

    def _fulfil(self, images: Sequence[Image]) -> None:
        """Encode claimed images. Whatever happens, every claim is given up and every waiter gets an answer."""
        results: Sequence[Encoded] = []
        try:
            results = self._encode(images)
        finally:
            lost = KimiError("the vision encoder failed on a batch that held this image")
            with self._lock:
                for index, image in enumerate(images):
                    key = self._scope + image.key
                    rows = results[index] if results else lost
                    if isinstance(rows, Tensor):
                        self.cache.put(key, rows)
                    self._in_flight.pop(key).set_result(rows)

    def _encode(self, images: Sequence[Image]) -> list[Encoded]:
        if not images:
            return []
        results = self._encoder.encode([image.pixel_values for image in images], [image.grid for image in images])
        return [rows if isinstance(rows, KimiError) else rows.to("cpu", torch.bfloat16) for rows in results]
