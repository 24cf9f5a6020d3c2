# SPDX-License-Identifier: Apache-2.0
"""What vLLM streams back: server-sent events, each with some tokens of the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from kimi_triton.llm.engine import FinishReason, Token

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class VllmFailed(Exception):
    """A server did not do its work; another one, or the same one later, may."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that came together. `ended` without a token that says so ends the answer after them."""

    tokens: list[Token]
    ended: FinishReason | None


async def read_in_time(response: aiohttp.ClientResponse, every_s: float) -> AsyncIterator[bytes]:
    """What a response brings: the first bytes at once, later ones at most once in `every_s` seconds.

    Meanwhile the rest waits in the socket. All responses wait for the same moments, so that many fast streams wake this
    process, and those behind it, together and seldom. A stream of fewer than 1 / `every_s` tokens a second does not
    notice.
    """
    clock = asyncio.get_running_loop()
    while chunk := await response.content.readany():
        now = clock.time()
        next_at = now if every_s <= 0 else (now // every_s + 1) * every_s
        yield chunk
        transport = response.connection.transport if response.connection is not None else None
        wait_s = next_at - clock.time()
        if transport is not None and wait_s > 0:  # without one all has arrived
            transport.pause_reading()
            await asyncio.sleep(wait_s)
            transport.resume_reading()


async def read_pieces(chunks: AsyncIterable[bytes], stop_ids: frozenset[int]) -> AsyncIterator[Piece]:
    """One piece for all events that came together, however the bytes of a response are cut. Raises VllmFailed."""
    held = b""
    async for chunk in chunks:
        *lines, held = (held + chunk).split(b"\n")
        tokens: list[Token] = []
        for line in lines:
            if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                continue
            try:
                piece = parse_piece(data, stop_ids)
            except VllmFailed:
                if tokens:
                    yield Piece(tokens, None)
                raise
            tokens += piece.tokens
            if piece.ended or (tokens and tokens[-1].finish_reason):
                yield Piece(tokens, piece.ended)
                return
        if tokens:
            yield Piece(tokens, None)
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
