# SPDX-License-Identifier: Apache-2.0
"""What vLLM streams back: server-sent events, each with some tokens of the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any

from kimi_triton.llm.engine import FinishReason, Token

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class VllmFailed(Exception):
    """A server did not do its work; another one, or the same one later, may."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one event. `ended` without a token that says so ends the answer after them."""

    tokens: list[Token]
    ended: FinishReason | None


async def read_pieces(chunks: AsyncIterable[bytes], stop_ids: frozenset[int]) -> AsyncIterator[Piece]:
    """Pieces of an answer from the bytes of a response, however they are cut. Raises VllmFailed."""
    held = b""
    async for chunk in chunks:
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield parse_piece(data, stop_ids)
    raise VllmFailed("the answer broke off")


def parse_piece(data: bytes, stop_ids: frozenset[int]) -> Piece:
    """One event. The token that ends an answer carries the reason, as with every engine."""
    try:
        event: dict[str, Any] = json.loads(data)
        if error := event.get("error"):
            raise VllmFailed(str(error.get("message", error) if isinstance(error, dict) else error)[:500])
        if not (choices := event.get("choices")):
            return Piece([], None)
        choice: dict[str, Any] = choices[0]
        token_ids = [int(token_id) for token_id in choice.get("token_ids") or []]
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or [None] * len(token_ids)
        stated, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
    except (ValueError, TypeError, AttributeError) as exc:
        raise VllmFailed(f"an event cannot be read ({exc}): {data[:200]!r}") from exc
    if stated is not None and stated not in FINISH_REASONS:
        raise VllmFailed(f"the answer ended with finish_reason {stated!r}")
    ended = FINISH_REASONS[stated] if stated else None
    if ended == "stop" and isinstance(stop_reason, int) and stop_reason not in token_ids[-1:]:
        token_ids, logprobs = [*token_ids, stop_reason], [*logprobs, None]
    tokens = [Token(token_id, logprob) for token_id, logprob in zip(token_ids, logprobs, strict=False)]
    for place, token in enumerate(tokens):
        if token.token_id in stop_ids:
            return Piece([*tokens[:place], Token(token.token_id, token.logprob, "stop")], None)
    if ended and tokens:
        tokens[-1] = Token(tokens[-1].token_id, tokens[-1].logprob, ended)
        return Piece(tokens, None)
    return Piece(tokens, ended)
