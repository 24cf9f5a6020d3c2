# SPDX-License-Identifier: Apache-2.0
"""A server that lives in the test: a `Transport` that answers from a script and remembers what it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kimi_client import Health, KimiClient, KimiClientError
from kimi_client.request import CANCEL_MODEL, VISION_MODEL, InferRequest
from kimi_client.tensors import Outputs


def response(text: str, finish_reason: str = "", completion_tokens: int = 1) -> Outputs:
    """One response of kimi_vl, as both protocols read it."""
    texts = {"text_output": text, "reasoning_output": "", "finish_reason": finish_reason, "logprobs": "[-0.5]"}
    counts = {"prompt_tokens": 7, "completion_tokens": completion_tokens, "cached_images": 0}
    return {name: np.array([value.encode()], dtype=np.object_) for name, value in texts.items()} | {
        name: np.array([value], dtype=np.int32) for name, value in counts.items()
    }


@dataclass
class FakeTransport:
    """Yields `pieces` one by one, `pause_s` apart; `error` is raised after the last of them."""

    pieces: Sequence[Outputs] = (response("a "), response("b "), response("c", "stop", 3))
    pause_s: float = 0.0
    error: KimiClientError | None = None
    embeds: Outputs | None = None
    requests: list[InferRequest] = field(default_factory=list)
    hung_up: int = 0
    closed: int = 0

    @property
    def cancelled_ids(self) -> list[str]:
        return [bytes(r.inputs["request_id"][0]).decode() for r in self.requests if r.model == CANCEL_MODEL]

    async def infer(self, request: InferRequest) -> Outputs:
        self.requests.append(request)
        if request.model == CANCEL_MODEL:
            return {"cancelled": np.array([True])}
        assert request.model == VISION_MODEL
        assert self.embeds is not None
        await asyncio.sleep(self.pause_s)
        return self.embeds

    async def complete(self, request: InferRequest) -> Outputs:
        self.requests.append(request)
        await asyncio.sleep(self.pause_s)
        if self.error is not None:
            raise self.error
        return self.pieces[-1]

    async def stream(self, request: InferRequest) -> AsyncGenerator[Outputs, None]:
        self.requests.append(request)
        try:
            for piece in self.pieces:
                await asyncio.sleep(self.pause_s)
                yield piece
            if self.error is not None:
                raise self.error
        finally:
            self.hung_up += 1

    async def health(self, models: Sequence[str]) -> Health:
        return Health(True, True, {name: True for name in models}, "2.51.0")

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fake() -> type[FakeTransport]:
    return FakeTransport


@pytest.fixture
def make_response() -> Callable[..., Any]:
    return response


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, live_server: Any) -> str:
    return live_server.grpc_url if request.param == "grpc" else f"http://{live_server.http_url}"


@pytest.fixture
def kimi(url: str) -> Iterator[KimiClient]:
    with KimiClient(url, timeout_s=60) as client:
        yield client
