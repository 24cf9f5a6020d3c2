# SPDX-License-Identifier: Apache-2.0
"""When a gRPC stream is cancelled: only by those who leave it early, since Triton 2.51 keeps memory of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from kimi_client.endpoint import Endpoint, TlsFiles
from kimi_client.errors import InvalidRequest
from kimi_client.grpc_transport import GrpcTransport
from kimi_client.request import InferRequest


class Call:
    """A stream that brings an error and ends on its own a little later."""

    def __init__(self) -> None:
        self.has_ended = False
        self.was_cancelled_early = False

    async def __aiter__(self) -> AsyncIterator[tuple[Any, Any]]:
        yield None, InferenceServerException("image 0: bad")
        await asyncio.sleep(0.05)
        self.has_ended = True

    def cancel(self) -> None:
        self.was_cancelled_early |= not self.has_ended


def test_a_stream_that_brings_an_error_is_read_to_its_end() -> None:
    call = Call()
    endpoint = Endpoint.parse("localhost:8001")
    transport = GrpcTransport(endpoint, headers={}, tls=TlsFiles(), shared_memory=False)
    transport.__dict__["_client"] = SimpleNamespace(stream_infer=lambda _requests, headers: call)  # noqa: ARG005

    async def ask() -> list[Any]:
        return [
            outputs
            async for outputs in transport.stream(InferRequest(model="kimi_vl", inputs={"text_input": [b"Hello"]}))
        ]

    with pytest.raises(InvalidRequest, match="image 0: bad"):
        asyncio.run(ask())
    assert call.has_ended
    assert not call.was_cancelled_early
