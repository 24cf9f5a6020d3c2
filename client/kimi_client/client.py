# SPDX-License-Identifier: Apache-2.0
"""The client for ordinary code: `AsyncKimiClient` run in a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kimi_client.aio import DEFAULT_TIMEOUT_S, STOP_TIMEOUT_S, AsyncKimiClient, AsyncStream
from kimi_client.answer import Answer, Chunk
from kimi_client.endpoint import TlsFiles
from kimi_client.images import ImageLike
from kimi_client.loop_thread import LoopThread
from kimi_client.messages import Message
from kimi_client.request import Options
from kimi_client.transport import Health, Transport

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class KimiClient:
    """Asks a kimi-triton server questions about pictures.

        with KimiClient("localhost:8001") as kimi:
            print(kimi.ask("What is this?", images=["cat.jpg"]))

    url            "localhost:8001" or "grpc://..." for gRPC, "http://localhost:8000" for HTTP; "grpcs", "https" for TLS
    headers        sent with every call, for proxies that want a token
    timeout_s      seconds to wait for an answer, or in a stream for the next piece; float("inf") waits for ever
    tls            certificate files, where the system's own do not suffice
    shared_memory  hand inputs from 1 MiB over in /dev/shm, by gRPC and for `embed`; only for a server on this host
    transport      instead of a URL, anything that implements `Transport`; for tests

    A picture is a path, a data URL, the bytes of a file, a Pillow image, or a uint8 array (height, width[, 1, 3 or 4]).
    Calls may come from any thread. A call that times out or is interrupted by Ctrl-C stops the work on the server.
    Everything raised on purpose is a `KimiClientError`; nothing is tried a second time.
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
        self._client = AsyncKimiClient(
            url, headers=headers, timeout_s=timeout_s, tls=tls, shared_memory=shared_memory, transport=transport
        )
        self._loop = LoopThread()
        # Also runs at interpreter exit, so that a program which never closes still tells the server to stop.
        self._close = weakref.finalize(self, _shut_down, self._loop, self._client)

    def ask(
        self,
        question: str,
        images: Sequence[ImageLike] = (),
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Ask one question about some pictures and wait for the whole answer.

        `request_id` names the request for `cancel`; a fresh one is made otherwise. `options` are those of `Options`:
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop, thinking, logprobs.
        """
        return self._loop.run(self._client.ask(question, images, timeout_s=timeout_s, request_id=request_id, **options))

    def chat(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageLike] = (),
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Continue a conversation in OpenAI's form and wait for the whole answer.

        A part `{"type": "image"}` stands for the next of `images`; `{"type": "image", "image": PICTURE}` and OpenAI's
        `image_url` with a data URL carry their own.
        """
        return self._loop.run(
            self._client.chat(messages, images, timeout_s=timeout_s, request_id=request_id, **options)
        )

    def stream(
        self,
        prompt: str | Sequence[Message],
        images: Sequence[ImageLike] = (),
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Answer a question (str) or a conversation (messages) piece by piece.

            for chunk in kimi.stream("Describe it.", images=["cat.jpg"]):
                print(chunk, end="", flush=True)

        The last chunk has `finish_reason` and `usage`. Breaking out of the loop stops the work on the server.
        Nothing is sent before the first piece is asked for.
        """
        return Stream(
            self._loop, self._client.stream(prompt, images, timeout_s=timeout_s, request_id=request_id, **options)
        )

    def embed(
        self, images: Sequence[ImageLike], *, timeout_s: float | None = None, request_id: str | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the vision encoder's rows for each picture: float32 (num_image_tokens, hidden), exact BF16 values.

        All pictures travel in one request, so hundreds of them are better sent in several calls.
        """
        return self._loop.run(self._client.embed(images, timeout_s=timeout_s, request_id=request_id))

    def cancel(self, request_id: str) -> bool:
        """Stop the work on a request of this or any other client. True if it was still running."""
        return self._loop.run(self._client.cancel(request_id))

    def health(self) -> Health:
        """Return what the server says of itself; raises ServerUnavailable where nobody answers."""
        return self._loop.run(self._client.health())

    def close(self) -> None:
        """Stop the streams that are still open and hang up. Closing twice is harmless."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """An answer that is being written: an iterator of `Chunk`.

    Leaving it before its end stops the work on the server: at `close`, at the end of a `with`, when the client closes,
    or when the last reference goes, as after a `break` out of `for chunk in kimi.stream(...)`.
    """

    def __init__(self, loop: LoopThread, stream: AsyncStream) -> None:
        self._loop = loop
        self._stream = stream

    @property
    def request_id(self) -> str:
        """The name of this request for `KimiClient.cancel`."""
        return self._stream.request_id

    @property
    def answer(self) -> Answer:
        """All pieces joined; raises ServerError before the last one has been read."""
        return self._stream.answer

    def cancel(self) -> bool:
        """Ask the server to stop, from any thread; whoever reads the stream sees it end."""
        return self._loop.run(self._stream.cancel())

    def close(self) -> None:
        """Stop reading, and stop the work on the server if it was not finished."""
        self._loop.run(self._stream.close())

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            return self._loop.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _shut_down(loop: LoopThread, client: AsyncKimiClient) -> None:
    loop.stop(client.close(), STOP_TIMEOUT_S)
