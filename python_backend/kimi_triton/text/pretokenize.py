# SPDX-License-Identifier: Apache-2.0
"""How text is cut before byte-pair merging: the pattern of the released tokenizer and its two length rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

_HAN_RUN = r"[\p{Han}]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

# Rust-regex syntax (`&&` intersects two classes). Earlier alternatives win.
PATTERN = "|".join(
    [
        _HAN_RUN,
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")  # \s of Python's re is exactly str.isspace, the rule of the released tokenizer


def cut(text: str) -> Iterator[str]:
    """The pieces of `text` that are tokenized on their own; joined they are `text` again.

    The released tokenizer cuts every 400,000 characters, and inside such a piece after every 25,000 characters of one
    run of white space or of one run of anything else. It applies this to the rendered prompt, we to the text between
    two control tokens; ids can differ from it only next to a cut in a run longer than 25,000 characters.
    """
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        if len(piece) <= MAX_RUN_CHARS:
            yield piece
        else:
            yield from _cut_long_runs(piece)


def _cut_long_runs(piece: str) -> Iterator[str]:
    begin = 0
    for run in _RUN.finditer(piece):
        for end in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            yield piece[begin:end]
            begin = end
    yield piece[begin:]
