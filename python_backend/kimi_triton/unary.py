# SPDX-License-Identifier: Apache-2.0
"""Whole answers for callers that cannot stream: one request to the streaming model over loopback, one response back.

BLS with decoupled models kills the stub of older servers under load, a gRPC stream to the same server does not. All
requests share one event loop and one channel; each has a stream of its own, so that one can be cancelled alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import numpy as np
import tritonclient.grpc.aio as grpcclient
from grpc.aio import AioRpcError

from kimi_triton.errors import Cancelled, KimiError, Unavailable, error_from_text

MODEL = "kimi_vl"
POLL_S = 0.05  # how often a waiting request asks whether its caller is still there
RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "binary_data_output", "stream"}

Parameters = Mapping[str, str | int | bool | float]


class ResponseSink(Protocol):
    """Where an answer goes; `triton_io.ResponseStream` is one."""

    def send(self, outputs: Mapping[str, Any], final: bool) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def is_cancelled(self) -> bool: ...


class UnaryFront:
    """Forwards requests to the streaming model of the server at `grpc_url`."""

    def __init__(self, grpc_url: str) -> None:
        self._url = grpc_url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="unary-front", daemon=True)
        self._thread.start()
        self._client: grpcclient.InferenceServerClient | None = None

    def submit(
        self, inputs: Mapping[str, list[bytes] | None], parameters: Parameters, request_id: str, sink: ResponseSink
    ) -> None:
        """Start answering one request; `sink` gets exactly one final response, later and from another thread."""
        request = {
            "model_name": MODEL,
            "inputs": [_bytes_input(name, elements) for name, elements in inputs.items() if elements is not None],
            "request_id": request_id,
            "timeout": parameters.get("timeout"),
            "parameters": {name: value for name, value in parameters.items() if name not in RESERVED | {"timeout"}}
            | {"stream": False},
        }
        asyncio.run_coroutine_threadsafe(self._answer(request, sink), self._loop)

    def stop(self) -> None:
        """Cancel what is waiting and end the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    async def _answer(self, request: dict[str, Any], sink: ResponseSink) -> None:
        asking = asyncio.ensure_future(self._ask(request))
        try:
            while not (await asyncio.wait({asking}, timeout=POLL_S))[0]:
                if sink.is_cancelled():
                    asking.cancel()
            outputs = asking.result()
        except asyncio.CancelledError:
            sink.fail(Cancelled("the caller cancelled the request"))
        except Exception as exc:
            sink.fail(exc)
        else:
            sink.send(outputs, final=True)

    async def _ask(self, request: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        if self._client is None:  # made on the loop it belongs to
            self._client = grpcclient.InferenceServerClient(self._url)
        # Without Triton's `triton_grpc_error` header, which would give a status code: 2.51 dies of it (signal 11) when
        # it answers an error on a stream after some other stream was cancelled.
        responses = self._client.stream_infer(_once(request))
        try:
            async for result, error in responses:
                if error is not None:
                    raise error_from_text(error.message())
                names = [output.name for output in result.get_response().outputs]
                return {name: result.as_numpy(name) for name in names}
        except AioRpcError as exc:
            raise Unavailable(f"the server's own gRPC endpoint: {exc.details() or exc.code()}") from exc
        finally:
            responses.cancel()
        raise KimiError(f"{MODEL} ended the stream without an answer")

    async def _close(self) -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if self._client is not None:
            await self._client.close()


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _bytes_input(name: str, elements: list[bytes]) -> grpcclient.InferInput:
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return grpcclient.InferInput(name, [len(elements)], "BYTES").set_data_from_numpy(array)
