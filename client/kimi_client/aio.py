# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio. `kimi_client.client` runs this same class for callers without an event loop."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kimi_client.answer import Answer, Chunk, join_chunks, read_chunk, split_embeds
from kimi_client.endpoint import TlsFiles
from kimi_client.errors import KimiClientError, RequestTimeout
from kimi_client.images import ImageLike
from kimi_client.messages import Message
from kimi_client.request import PUBLIC_MODELS, InferRequest, Options, cancel_request, chat_request, vision_request
from kimi_client.transport import Health, Transport, connect

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0  # how long a caller who gives up waits for the server to hear of it


class AsyncKimiClient:
    """The asyncio twin of `KimiClient`: the same arguments and answers, awaited.

        async with AsyncKimiClient("localhost:8001") as kimi:
            answer = await kimi.ask("What is this?", images=["cat.jpg"])
            async for chunk in kimi.stream("And in one word?", images=["cat.jpg"]):
                print(chunk, end="")

    A task that is cancelled while it waits here tells the server to stop, as do timeouts and streams left early.
    One client serves any number of concurrent tasks of one event loop.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tls: TlsFiles | None = None,
        shared_memory: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._transport = transport or connect(
            url, headers=headers or {}, tls=tls or TlsFiles(), shared_memory=shared_memory
        )
        # Weak, so that a stream which its caller drops ends at once and not when the client closes.
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()
        self._unfinished: set[str] = set()  # ids of the streams that have begun
        self._stopping: set[asyncio.Task[None]] = set()

    async def ask(
        self,
        question: str,
        images: Sequence[ImageLike] = (),
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Ask one question about some pictures; see `KimiClient.ask`."""
        return await self._answer(question, images, timeout_s, request_id, options)

    async def chat(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageLike] = (),
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Continue a conversation; see `KimiClient.chat`."""
        return await self._answer(messages, images, timeout_s, request_id, options)

    def stream(
        self,
        prompt: str | Sequence[Message],
        images: Sequence[ImageLike] = (),
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Answer piece by piece; see `KimiClient.stream`. Nothing is sent before the first piece is awaited."""
        request = chat_request(prompt, images, options, stream=True, request_id=request_id)
        stream = AsyncStream(self, request.request_id, self._chunks(request, self._limit(timeout_s)))
        self._streams.add(stream)
        return stream

    async def embed(
        self,
        images: Sequence[ImageLike],
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> list[NDArray[np.float32]]:
        """Return one array (num_image_tokens, hidden) per image; see `KimiClient.embed`."""
        request = vision_request(images, request_id=request_id)
        return split_embeds(await self._bounded(self._transport.infer(request), request, self._limit(timeout_s)))

    async def cancel(self, request_id: str) -> bool:
        """Tell the server to stop work on a request; see `KimiClient.cancel`."""
        outputs = await self._within(self._transport.infer(cancel_request(request_id)), self._timeout_s)
        return bool(outputs["cancelled"].item())

    async def health(self) -> Health:
        """Return what the server says of itself; see `KimiClient.health`."""
        return await self._within(self._transport.health(PUBLIC_MODELS), self._timeout_s)

    async def close(self) -> None:
        """Leave the streams that are still open, which stops them on the server, and hang up."""
        for stream in tuple(self._streams):
            await stream.close()
        for request_id in tuple(self._unfinished):  # dropped a moment ago and not yet collected
            await self._stop(request_id)
        await asyncio.gather(*self._stopping)
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _answer(
        self,
        prompt: str | Sequence[Message],
        images: Sequence[ImageLike],
        timeout_s: float | None,
        request_id: str | None,
        options: Mapping[str, Any],
    ) -> Answer:
        request = chat_request(prompt, images, options, stream=False, request_id=request_id)
        outputs = await self._bounded(self._transport.complete(request), request, self._limit(timeout_s))
        return join_chunks([read_chunk(outputs)], request.request_id)

    async def _chunks(self, request: InferRequest, timeout_s: float) -> AsyncGenerator[Chunk, None]:
        responses = self._transport.stream(request)
        self._unfinished.add(request.request_id)
        try:
            while (outputs := await self._bounded(anext(responses, None), request, timeout_s)) is not None:
                chunk = read_chunk(outputs)
                if chunk.finish_reason is not None:
                    self._unfinished.discard(request.request_id)
                yield chunk
        except GeneratorExit:
            if request.request_id in self._unfinished:
                await self._stop(request.request_id)
            raise
        finally:
            self._unfinished.discard(request.request_id)
            await responses.aclose()

    async def _bounded(self, call: Awaitable[T], request: InferRequest, timeout_s: float) -> T:
        """Await a call; where it takes too long or the caller goes away, tell the server to stop."""
        try:
            return await self._within(call, timeout_s)
        except (RequestTimeout, asyncio.CancelledError):
            await self._stop(request.request_id)
            raise

    async def _within(self, call: Awaitable[T], timeout_s: float) -> T:
        try:
            return await asyncio.wait_for(call, None if math.isinf(timeout_s) else timeout_s)
        except asyncio.TimeoutError as error:
            raise RequestTimeout(f"no answer within {timeout_s:g} s") from error

    async def _stop(self, request_id: str) -> None:
        self._unfinished.discard(request_id)
        # A task of its own, so that a caller who is cancelled once more does not take it along.
        task = asyncio.create_task(self._tell_to_stop(request_id))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
        await asyncio.shield(task)

    async def _tell_to_stop(self, request_id: str) -> None:
        # The caller has its own error by now, so a server that cannot hear us must not hide it with another.
        with suppress(KimiClientError):
            await self._within(self._transport.infer(cancel_request(request_id)), STOP_TIMEOUT_S)

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s


class AsyncStream:
    """An answer that is being written: an async iterator of `Chunk`.

    Leaving it before its end stops the work on the server: at `close`, at the end of an `async with`, when the client
    closes, or when the last reference goes.
    """

    def __init__(self, client: AsyncKimiClient, request_id: str, chunks: AsyncGenerator[Chunk, None]) -> None:
        self.request_id = request_id
        self._client = client
        self._chunks = chunks
        self._is_awaited = False
        self._received: list[Chunk] = []

    @property
    def answer(self) -> Answer:
        """All pieces joined; raises ServerError before the last one has been read."""
        return join_chunks(self._received, self.request_id)

    async def cancel(self) -> bool:
        """Ask the server to stop; whoever reads the stream sees it end. True if the request was still running."""
        return await self._client.cancel(self.request_id)

    async def close(self) -> None:
        """Stop reading, and stop the work on the server if it was not finished."""
        if self._is_awaited:  # another task is waiting for a piece and will see the end
            await self.cancel()
        else:
            await self._chunks.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        self._is_awaited = True
        try:
            chunk = await anext(self._chunks)
        finally:
            self._is_awaited = False
        self._received.append(chunk)
        return chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
