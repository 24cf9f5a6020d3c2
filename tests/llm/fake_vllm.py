# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that speaks as much of vLLM's API as the engine uses, and fails on demand."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web
from torch import Tensor

from tests.llm.scripted import Script, ScriptedDecoder


@dataclass(frozen=True)
class Fault:
    """What happens to the next request, after some tokens."""

    after: int = 0
    status: int = 0  # answer with this HTTP status
    hangs: bool = False  # say nothing more
    event: str = ""  # send this event, then end


def rows_of(token_ids: Tensor) -> Tensor:
    """Text rows that are their ids, as those of ScriptedDecoder."""
    return token_ids.double().unsqueeze(1)


class FakeVllm(ScriptedDecoder):
    """Answers by the script; `rows` holds what is being answered. `url` is valid after `start`."""

    def __init__(
        self, script: Script, vocab_size: int = 600, step_s: float = 0.0, context: int = 4096, per_event: int = 1
    ) -> None:
        super().__init__(script, vocab_size, step_s)
        self.context, self.per_event = context, per_event
        self.faults: deque[Fault] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.ends_with_stop_token = True
        self.frozen = False  # take requests, and answer none until this is false again
        self.port = 0
        self._numbers = itertools.count()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeVllm:
        """Also after `stop`, at the same port."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(timeout=10)
        return self

    def stop(self) -> None:
        """End at once, whatever is being answered."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.rows.clear()

    async def _open(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        server = self._runner.server
        await self._runner.cleanup()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while server is not None and server.connections:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)  # until the sockets of these are closed too

    async def _thaw(self) -> None:
        while self.frozen:
            await asyncio.sleep(0.05)

    async def _health(self, _request: web.Request) -> web.Response:
        await self._thaw()
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": self.context}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        await self._thaw()
        fault = self.faults.popleft() if self.faults else Fault(after=10**9)
        if fault.status:
            return web.json_response({"error": {"message": "by order of the test"}}, status=fault.status)
        embeds = torch.load(io.BytesIO(base64.b64decode(body["prompt_embeds"])), weights_only=True)
        ids = embeds[:, 0].long().tolist()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        number = next(self._numbers)
        self.rows[number] = ids
        try:
            await self._answer(response, ids, body, fault)
        except ConnectionError:  # the client has gone
            pass
        finally:
            self.rows.pop(number, None)
        return response

    async def _answer(self, response: web.StreamResponse, ids: list[int], body: dict[str, Any], fault: Fault) -> None:
        bias = torch.zeros(self.vocab_size)
        for token_id, value in body["logit_bias"].items():
            bias[int(token_id)] += value
        tokens: list[int] = []
        logprobs: list[float] = []
        for done in range(1, body["max_tokens"] + 1):
            if done > fault.after:
                await self._fail(response, fault)
                return
            await asyncio.sleep(self.step_s)
            await self._thaw()
            self.steps.append([])
            try:
                logits = self._logits(self.script(list(ids)))
            except RuntimeError as exc:
                await _send(response, {"error": {"message": f"RuntimeError: {exc}", "code": 500}})
                return
            token_id = int((logits + bias).argmax())
            ids.append(token_id)
            is_stop = token_id in body["stop_token_ids"]
            if not is_stop or self.ends_with_stop_token:
                tokens.append(token_id)
                logprobs.append(float(logits.log_softmax(0)[token_id]))
            reason = "stop" if is_stop else "length" if done == body["max_tokens"] else None
            if reason or len(tokens) >= self.per_event:
                choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason}
                if "logprobs" in body:
                    choice["logprobs"] = {"token_logprobs": logprobs}
                if is_stop:
                    choice["stop_reason"] = token_id
                await _send(response, {"choices": [choice]})
                tokens, logprobs = [], []
            if reason:
                break
        await response.write(b"data: [DONE]\n\n")

    async def _fail(self, response: web.StreamResponse, fault: Fault) -> None:
        if fault.hangs:
            await asyncio.sleep(3600)
        if fault.event:
            await response.write(f"data: {fault.event}\n\n".encode())


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
