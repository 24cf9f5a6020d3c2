# SPDX-License-Identifier: Apache-2.0
"""Whole answers for callers that cannot stream: one request to the streaming model over loopback, one response back.

BLS with decoupled models kills the stub of older servers under load, a gRPC stream to the same server does not. All
requests share one event loop and one channel; each has a stream of its own, so that one can be cancelled alone.
Closing that stream stops nothing that runs already, so whoever vanishes is also posted on the cancel board.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import numpy as np
import tritonclient.grpc.aio as grpcclient
from grpc.aio import AioRpcError

from kimi_triton.cancel_board import CancelBoard
from kimi_triton.errors import Cancelled, KimiError, Unavailable, error_from_text

MODEL = "kimi_vl"
POLL_S = 0.05  # how often a waiting request asks whether its caller is still there
DEADLINE_GRACE_S = 0.5  # a running answer ends by itself at its deadline and is still worth having then
RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "binary_data_output", "stream"}

Parameters = Mapping[str, str | int | bool | float]
Outputs = dict[str, "np.ndarray[Any, Any]"]


class ResponseSink(Protocol):
    """Where an answer goes; `triton_io.ResponseStream` is one."""

    def send(self, outputs: Mapping[str, Any], final: bool) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def is_cancelled(self) -> bool: ...


class UnaryFront:
    """Forwards requests to the streaming model of the server at `grpc_url`, at most `max_live` at once."""

    def __init__(self, grpc_url: str, board: CancelBoard, max_live: int) -> None:
        self._url = grpc_url
        self._board = board
        self._max_live = max_live
        self._num_live = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="unary-front", daemon=True)
        self._thread.start()
        self._client: grpcclient.InferenceServerClient | None = None

    def submit(
        self,
        inputs: Mapping[str, list[bytes] | None],
        parameters: Parameters,
        request_id: str,
        timeout_s: float | None,
        sink: ResponseSink,
    ) -> None:
        """Start answering one request; `sink` gets exactly one final response, later and from another thread."""
        request = {
            "model_name": MODEL,
            "inputs": [_bytes_input(name, elements) for name, elements in inputs.items() if elements is not None],
            "request_id": request_id or uuid.uuid4().hex,  # without one it could not be cancelled
            "timeout": None if timeout_s is None else int(timeout_s * 1e6),
            "parameters": {name: value for name, value in parameters.items() if name not in RESERVED | {"timeout"}}
            | {"stream": False},
        }
        asyncio.run_coroutine_threadsafe(self._answer(request, timeout_s, sink), self._loop)

    def stop(self) -> None:
        """Cancel what is waiting and end the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, request: dict[str, Any], timeout_s: float | None, sink: ResponseSink) -> None:
        if self._num_live >= self._max_live:
            sink.fail(Unavailable(f"{self._num_live} unary requests are waiting for their answers already"))
            return
        self._num_live += 1
        try:
            sink.send(await self._watch(request, timeout_s, sink), final=True)
        except asyncio.CancelledError:
            sink.fail(Unavailable("the server is stopping"))
        except Exception as exc:
            sink.fail(exc)
        finally:
            self._num_live -= 1

    async def _watch(self, request: dict[str, Any], timeout_s: float | None, sink: ResponseSink) -> Outputs:
        """Wait for an answer as long as its caller does."""
        asking = asyncio.ensure_future(self._ask(request))
        give_up_at = time.monotonic() + (float("inf") if timeout_s is None else timeout_s + DEADLINE_GRACE_S)
        try:
            while not (await asyncio.wait({asking}, timeout=POLL_S))[0]:
                if sink.is_cancelled():
                    raise Cancelled("the caller went away")
                if time.monotonic() > give_up_at:
                    raise Unavailable(f"no answer within the time limit of {timeout_s} s")
            return asking.result()
        finally:
            if not asking.done():
                self._board.post(request["request_id"])
                asking.cancel()

    async def _ask(self, request: dict[str, Any]) -> Outputs:
        if self._client is None:  # made on the loop it belongs to
            self._client = grpcclient.InferenceServerClient(self._url)
        # Without Triton's `triton_grpc_error` header, which would give a status code: 2.51 dies of it (signal 11) when
        # it answers an error on a stream after some other stream was cancelled.
        responses = self._client.stream_infer(_once(request))
        outputs: Outputs | None = None
        failure: KimiError | None = None
        try:
            # To the end of the stream: each one that is cancelled instead, even after its answer or error, costs the
            # server 8 KB for ever.
            async for result, error in responses:
                if error is not None:
                    failure = error_from_text(error.message())
                else:
                    outputs = {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
        except AioRpcError as exc:
            raise Unavailable(f"the server's own gRPC endpoint: {exc.details() or exc.code()}") from exc
        except asyncio.CancelledError:
            responses.cancel()
            raise
        if failure is not None:
            raise failure
        if outputs is None:
            raise KimiError(f"{MODEL} ended the stream without an answer")
        return outputs

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
