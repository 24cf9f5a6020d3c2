# SPDX-License-Identifier: Apache-2.0
"""Reads perf_analyzer's profile export: when each request was sent, when its responses came, and what they counted.

perf_analyzer copies the bytes of every input into the export as they are, so a file with pictures in it is not UTF-8
and can be large; it is read as Latin-1, which leaves each byte one character, and request by request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_client.errors import KimiClientError


@dataclass(frozen=True, slots=True)
class Response:
    """One response: when it came (ns) and how many tokens of its answer had been written by then."""

    time_ns: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One answered request. Times are nanoseconds of the wall clock."""

    sent_ns: int
    responses: tuple[Response, ...]
    prompt_tokens: int
    cached_images: int
    finish_reason: str

    @property
    def completion_tokens(self) -> int:
        return self.responses[-1].completion_tokens

    @property
    def total_ms(self) -> float:
        """From sending to the last response; perf_analyzer's own latency of a stream ends with the first."""
        return (self.responses[-1].time_ns - self.sent_ns) / 1e6

    @property
    def first_ms(self) -> float:
        """From sending to the first response, which in a stream carries the first token."""
        return (self.responses[0].time_ns - self.sent_ns) / 1e6

    @property
    def token_gap_ms(self) -> float | None:
        """Mean time from one token to the next after the first response; None where all tokens came in that one."""
        first, last = self.responses[0], self.responses[-1]
        tokens = last.completion_tokens - first.completion_tokens
        return (last.time_ns - first.time_ns) / 1e6 / tokens if tokens else None


def read_export(path: Path) -> list[RequestRecord]:
    """Return every request of the only experiment in the file; raises KimiClientError where one was not answered."""
    return [_record(request) for request in _requests(path.read_bytes().decode("latin-1"))]


def _requests(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(strict=False)
    position = text.index("[", text.index('"requests"')) + 1
    while text[position] != "]":
        if text[position] in ", \n":
            position += 1
        else:
            request, position = decoder.raw_decode(text, position)
            yield request


def _record(request: dict[str, Any]) -> RequestRecord:
    # A stream may end with a response without outputs, which is no token and no answer.
    pairs = zip(request["response_timestamps"], request["response_outputs"], strict=True)
    answered = [(time_ns, outputs) for time_ns, outputs in pairs if "completion_tokens" in outputs]
    if not answered or not answered[-1][1]["finish_reason"]:
        raise KimiClientError(f"the request sent at {request['timestamp']} has no finished answer in the export")
    last = answered[-1][1]
    return RequestRecord(
        sent_ns=request["timestamp"],
        responses=tuple(Response(time_ns, outputs["completion_tokens"]) for time_ns, outputs in answered),
        prompt_tokens=last["prompt_tokens"],
        cached_images=last["cached_images"],
        finish_reason=last["finish_reason"],
    )
