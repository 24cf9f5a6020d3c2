# SPDX-License-Identifier: Apache-2.0
"""The engine that lives elsewhere: vLLM servers that take prompt embeddings and stream token ids.

One thread runs an event loop with one task for each request. A server that fails before the first token of a request
is replaced by another one; after it the caller gets an error, because an answer cannot be taken back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import aiohttp

from kimi_triton.errors import ConfigError, InvalidRequest, KimiError, Unavailable
from kimi_triton.llm.engine import FinishReason, TokenRequest, TokenSink, as_kimi_error
from kimi_triton.llm.vllm_body import RequestBody
from kimi_triton.llm.vllm_events import Piece, VllmFailed, read_in_time, read_pieces
from kimi_triton.llm.vllm_servers import NETWORK_FAILURES, ServerPool, VllmServer, VllmSettings, failure_text

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Live:
    """A request on its way. All but `request` and `sink` belongs to the event loop."""

    request: TokenRequest
    sink: TokenSink
    task: asyncio.Task[None] | None = None
    num_tokens: int = 0
    end_asked: FinishReason | None = None
    is_over: bool = False


class VllmEngine:
    """See `engine.Engine` for the methods."""

    def __init__(
        self,
        urls: tuple[str, ...],
        *,
        body: RequestBody,
        stop_ids: frozenset[int],
        context_length: int,
        settings: VllmSettings,
    ) -> None:
        self.context_length = context_length
        self._body = body
        self._stop_ids = stop_ids
        self._settings = settings
        self._pool = ServerPool(urls, settings)
        self._builders = ThreadPoolExecutor(2, thread_name_prefix="prompt-embeds")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}  # guarded by _lock
        self._stopping = False
        self._session: aiohttp.ClientSession
        self._looking: asyncio.Task[None]

    def start(self) -> None:
        """Wait for the first server. Raises ConfigError when none comes up in time."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except ConfigError:
            self.stop()
            raise
        lengths = [server.max_model_len for server in self._pool.servers if server.max_model_len is not None]
        self.context_length = min([self.context_length, *lengths])

    def is_healthy(self) -> bool:
        return self._thread.is_alive() and not self._stopping and self._pool.is_up()

    def submit(self, request: TokenRequest, sink: TokenSink) -> None:
        live = _Live(request, sink)
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise Unavailable("the connection to vLLM is not running")
            if request.request_id in self._live:
                raise InvalidRequest(f"request id {request.request_id!r} belongs to a request that is still running")
            if len(self._live) >= self._settings.max_live:
                raise Unavailable(f"{len(self._live)} requests are running or waiting, the limit")
            self._live[request.request_id] = live
            self._loop.call_soon_threadsafe(self._begin, live)  # before `stop` looks for tasks

    def cancel(self, request_id: str) -> bool:
        with self._lock:
            live = self._live.get(request_id)
        if live is None:
            return False
        self._loop.call_soon_threadsafe(self._ask_to_end, live, "cancelled")
        return True

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._builders.shutdown()

    async def _open(self) -> None:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._settings.connect_timeout_s, sock_read=self._settings.stall_timeout_s
        )
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        await self._pool.wait_for_one(self._session)
        self._looking = asyncio.create_task(self._pool.keep_looking(self._session))

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    def _begin(self, live: _Live) -> None:
        live.task = self._loop.create_task(self._serve(live))
        # A task that is cancelled before its first step never enters its own `try`.
        live.task.add_done_callback(lambda _: self._end(live, self._why_ended(live)))

    def _ask_to_end(self, live: _Live, reason: FinishReason) -> None:
        if live.task is not None and live.end_asked is None and not live.is_over:
            live.end_asked = reason
            live.task.cancel()

    async def _serve(self, live: _Live) -> None:
        deadline = live.request.deadline
        timer = None if deadline is None else self._loop.call_at(deadline, self._ask_to_end, live, "deadline")
        try:
            body = await self._loop.run_in_executor(self._builders, self._body.build, live.request)
            await self._ask_servers(live, body)
        except Exception as exc:
            self._end(live, as_kimi_error(exc))
        finally:
            if timer is not None:
                timer.cancel()

    def _why_ended(self, live: _Live) -> FinishReason | KimiError:
        if live.end_asked is None:
            return Unavailable("the language model has stopped")
        if live.end_asked == "deadline" and not live.num_tokens:
            return Unavailable("vLLM gave no token within the time limit of the request")
        return live.end_asked

    async def _ask_servers(self, live: _Live, body: bytes) -> None:
        failures: list[str] = []
        tried: set[VllmServer] = set()
        for _ in range(self._settings.attempts):
            server = self._pool.choose(tried)
            if server in tried:
                await asyncio.sleep(self._settings.retry_after_s)
            tried.add(server)
            server.num_live += 1
            try:
                await self._stream(server, live, body)
                return
            except (VllmFailed, *NETWORK_FAILURES) as exc:
                why = failure_text(exc)
                logger.warning("vLLM at %s failed a request after %d tokens: %s", server.url, live.num_tokens, why)
                if not isinstance(exc, VllmFailed):
                    server.mark(False, why)
                if live.num_tokens:
                    raise Unavailable(f"vLLM at {server.url} failed after {live.num_tokens} tokens: {why}") from exc
                failures.append(f"{server.url}: {why}")
            finally:
                server.num_live -= 1
        raise Unavailable(f"no vLLM server could answer: {'; '.join(failures)}")

    async def _stream(self, server: VllmServer, live: _Live, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{server.url}/v1/completions", data=body, headers=headers) as response:
            try:
                if response.status != 200:
                    await _refuse(server, response)
                chunks = read_in_time(response, self._settings.read_every_s)
                async for piece in read_pieces(chunks, self._stop_ids):
                    if self._deliver(live, piece):
                        return
            finally:
                response.close()  # ends the generation, if it still runs

    def _deliver(self, live: _Live, piece: Piece) -> bool:
        """Hand tokens on; true when the request is over."""
        for number, token in enumerate(piece.tokens, start=1):
            live.num_tokens += 1
            try:
                wants_more = live.sink.on_token(token, more=number < len(piece.tokens))
            except Exception as exc:
                self._end(live, as_kimi_error(exc))
                return True
            if token.finish_reason is not None or not wants_more:
                self._remove(live)
                return True
        if piece.ended is not None:
            self._end(live, piece.ended)
        return live.is_over

    def _end(self, live: _Live, how: FinishReason | KimiError) -> None:
        if live.is_over:
            return
        self._remove(live)
        try:
            if isinstance(how, KimiError):
                live.sink.on_error(how)
            else:
                live.sink.on_end(how)
        except Exception:
            logger.exception("request %s could not be told that it ended: %s", live.request.request_id, how)

    def _remove(self, live: _Live) -> None:
        live.is_over = True
        with self._lock:
            del self._live[live.request.request_id]


async def _refuse(server: VllmServer, response: aiohttp.ClientResponse) -> None:
    """Raise what an answer other than 200 means: vLLM may be busy or broken, or we asked for something wrong."""
    text = (await response.text())[:500]
    if response.status >= 500 or response.status == 429:
        raise VllmFailed(f"HTTP {response.status}: {text}")
    raise KimiError(f"vLLM at {server.url} refused the request with HTTP {response.status}: {text}")
