# SPDX-License-Identifier: Apache-2.0
"""Mixed requests to a running system, each of which ends in exactly one way that is counted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

PATIENCE_S = 60.0  # a request without an end by then is lost
GREEDY = {"max_tokens": 8, "temperature": 0, "thinking": False}
Body = dict[str, Any]


def picture(width: int, height: int, seed: int) -> str:
    """A JPEG of soft coloured clouds, as large as a photograph of that size, as base64 text."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 14 + 1, width // 14 + 1, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


PICTURES = [picture(width, height, seed) for seed, (width, height) in enumerate([(56, 56), (224, 168), (448, 336)])]
BAD_PICTURE = PICTURES[1][: len(PICTURES[1]) // 2 // 4 * 4]

# kind -> (model, body); the bad ones must be refused, the others must always get the same answer
GOOD: dict[str, tuple[str, Body]] = {
    "text": ("kimi_vl", {"text_input": "Hello", **GREEDY}),
    "small image": ("kimi_vl", {"text_input": "What?", "image": [PICTURES[0]], **GREEDY}),
    "images": ("kimi_vl", {"text_input": "What?", "image": PICTURES, **GREEDY}),
    "unary": ("kimi_vl_unary", {"text_input": "What?", "image": [PICTURES[1]], **GREEDY}),
}
BAD: dict[str, tuple[str, Body]] = {
    "cut image": ("kimi_vl", {"text_input": "What?", "image": [PICTURES[0], BAD_PICTURE], **GREEDY}),
    "bad option": ("kimi_vl", {"text_input": "Hello", "max_tokens": -1}),
    "bad messages": ("kimi_vl_unary", {"messages": "[" * 5000}),
}


@dataclass
class Counts:
    """answered, refused (any definite error), lost, vanished (by the caller's own will), wrong (another answer)."""

    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)

    @property
    def sent(self) -> int:
        return sum(self.ends.values())


class Traffic:
    """Requests to one system; `expected` are the right answers of the good kinds."""

    def __init__(self, http_url: str) -> None:
        self._url = http_url
        self._random = random.Random(0)
        self._encoded: dict[str, bytes] = {}  # so that sending costs little beside the system that is tried
        self.expected: dict[str, str] = {}
        self.counts = Counts()

    async def __aenter__(self) -> Traffic:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(PATIENCE_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def learn(self) -> None:
        """Ask each good kind once, alone."""
        for kind, (model, body) in GOOD.items():
            answer = await self._post(model, json.dumps(body).encode())
            self.expected[kind] = answer["text_output"]

    async def one(self, kind: str) -> None:
        """Send one request and count how it ended."""
        model, body = GOOD.get(kind) or BAD[kind]
        if kind not in self._encoded:
            self._encoded[kind] = json.dumps(body).encode()
        start = time.monotonic()
        try:
            answer = await self._post(model, self._encoded[kind])
        except TimeoutError:
            self.counts.ends["lost"] += 1
            return
        except aiohttp.ClientError as exc:  # the connection was refused or ended: a definite error for the caller
            answer = {"error": type(exc).__name__}
        if "error" in answer:
            self.counts.ends["refused"] += 1
            self.counts.errors[str(answer["error"])[:70]] += 1
        elif answer.get("text_output") == self.expected.get(kind):
            self.counts.ends["answered"] += 1
            self.counts.latencies_s.append(time.monotonic() - start)
        else:
            self.counts.ends["wrong"] += 1
            self.counts.errors[f"wrong answer to {kind}: {str(answer)[:60]}"] += 1

    async def vanish(self) -> None:
        """Send a request for a long answer and go away."""
        body = json.dumps(GOOD["images"][1] | {"max_tokens": 500}).encode()
        task = asyncio.create_task(self._post("kimi_vl", body))
        await asyncio.sleep(self._random.uniform(0, 0.3))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
            await task
        self.counts.ends["vanished"] += 1

    async def can_cancel(self) -> bool:
        """Whether cancellations are taken; this one is of a request that does not exist."""
        try:
            answer = await self._post("kimi_cancel", b'{"request_id": "nobody"}')
        except (TimeoutError, aiohttp.ClientError):
            return False
        return answer.get("cancelled") is False

    def any_kind(self, bad_share: float) -> str:
        return self._random.choice(list(BAD if self._random.random() < bad_share else GOOD))

    async def closed_loop(self, num_callers: int, stop: asyncio.Event, bad_share: float) -> None:
        """Each caller sends the next request when the last one has ended, a tenth of a second after an error."""

        async def call() -> None:
            while not stop.is_set():
                refused = self.counts.ends["refused"]
                await self.one(self.any_kind(bad_share))
                await asyncio.sleep(0.1 if self.counts.ends["refused"] > refused else 0)

        await asyncio.gather(*(call() for _ in range(num_callers)))

    async def open_loop(self, per_second: float, seconds: float) -> None:
        """Requests at a rate, whatever becomes of those before. Ends when the last one has."""
        start = time.monotonic()
        tasks = []
        for number in itertools.count():
            due = start + number / per_second
            if due > start + seconds:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self.one(self.any_kind(0))))
        await asyncio.gather(*tasks)

    async def _post(self, model: str, body: bytes) -> dict[str, Any]:
        url = f"{self._url}/v2/models/{model}/generate"
        async with self._session.post(url, data=body) as response:
            text = await response.text()
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            return {"error": f"HTTP {response.status}: {text[:50]}"}
        return answer
