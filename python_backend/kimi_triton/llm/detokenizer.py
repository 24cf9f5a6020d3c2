# SPDX-License-Identifier: Apache-2.0
"""Text from token ids, a piece at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """Byte-level tokens end anywhere, also inside a character; at most three bytes are held until it is complete.

    The pieces, joined, are what decoding all bytes at once with U+FFFD for what is no UTF-8 would give.
    """

    def __init__(self, decode_bytes: Callable[[Sequence[int]], bytes]) -> None:
        self._decode_bytes = decode_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._decode_bytes([token_id]))

    def finish(self) -> str:
        """One U+FFFD when the text ended inside a character, else nothing. The next text starts afresh."""
        return self._decoder.decode(b"", final=True)
