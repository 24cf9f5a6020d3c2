# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of one vLLM server, asked through Triton with a picture and asked directly with ready embeddings.

Pictures are encoded anew each time, and vLLM computes each prompt anew: both caches are off. Otherwise the direct way,
which sends the same bytes again and again, would skip its prompts. All answers have the full length, so that both ways
do the same work; where they end early by chance, vLLM computes smaller batches at the same cost.
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import tritonclient.grpc.aio as grpcclient
from PIL import Image

from kimi_client import AsyncKimiClient
from kimi_triton.checkpoint import Checkpoint
from kimi_triton.demo.asking import text_input
from kimi_triton.llm.engine import TokenRequest
from kimi_triton.llm.text_rows import TextRows
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.llm.vllm_body import RequestBody
from kimi_triton.preprocess.pipeline import Preprocessor, PreprocessRequest
from kimi_triton.serve.launch import launch
from kimi_triton.serve.options import ServeOptions
from kimi_triton.text.options import GenerationOptions
from kimi_triton.text.tokenizer import KimiTokenizer
from tests.vllm.vllm_process import VllmProcess

QUESTION = "Describe picture number {}."
TURNS = 4  # requests of each caller, one after the other, so that a caller who starts late does not end the batch late


class Direct:
    """The same requests as HTTP bodies that are ready to send."""

    def __init__(self, checkpoint: Checkpoint, url: str) -> None:
        config = checkpoint.config
        roles = TokenRoles.from_checkpoint(
            checkpoint.folder, config, KimiTokenizer.from_checkpoint(checkpoint.folder, config)
        )
        self._url = f"{url}/v1/completions"
        self._preprocessor = Preprocessor.from_checkpoint(checkpoint.folder)
        self._builder = RequestBody(TextRows(checkpoint), roles, config.media_placeholder_token_id)

    def body(self, question: str, image: bytes, rows: torch.Tensor, max_tokens: int) -> bytes:
        result = self._preprocessor.run(PreprocessRequest(text_input=question.encode(), images=[image]))
        assert result.input_ids is not None
        ids = torch.from_numpy(result.input_ids.astype(np.int64))
        options = GenerationOptions(temperature=0)
        return self._builder.build(
            TokenRequest(request_id="", input_ids=ids, image_embeds=rows, options=options, max_tokens=max_tokens)
        )

    async def ask_all(self, bodies: list[bytes]) -> int:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            return sum(await asyncio.gather(*(self._ask_in_turn(session, body) for body in bodies)))

    async def _ask_in_turn(self, session: aiohttp.ClientSession, body: bytes) -> int:
        return sum([await self._ask(session, body) for _ in range(TURNS)])

    async def _ask(self, session: aiohttp.ClientSession, body: bytes) -> int:
        tokens = 0
        async with session.post(self._url, data=body, headers={"Content-Type": "application/json"}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    tokens += sum(len(choice["token_ids"]) for choice in json.loads(line[6:])["choices"])
        return tokens


async def ask_triton(grpc_url: str, questions: list[str], images: list[bytes], max_tokens: int) -> int:
    """Tokens of answers that are streamed to tritonclient, which does as little with a piece as `Direct` does."""
    parameters = {"temperature": 0.0, "max_tokens": max_tokens, "stream": True}

    async def ask(client: grpcclient.InferenceServerClient, question: str, image: bytes) -> int:
        inputs = [text_input("text_input", [question.encode()]), text_input("image", [image])]

        async def once() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "kimi_vl", "inputs": inputs, "parameters": parameters}

        text, tokens = b"", 0
        async for result, error in client.stream_infer(once()):
            if error is not None:
                raise error
            text += result.as_numpy("text_output")[0] + result.as_numpy("reasoning_output")[0]
            tokens = int(result.as_numpy("completion_tokens")[0])
        assert text
        return tokens

    async def ask_in_turn(client: grpcclient.InferenceServerClient, question: str, image: bytes) -> int:
        return sum([await ask(client, question, image) for _ in range(TURNS)])

    async with grpcclient.InferenceServerClient(grpc_url) as client:
        pairs = zip(questions, images, strict=True)
        return sum(await asyncio.gather(*(ask_in_turn(client, question, image) for question, image in pairs)))


def measure(folder: Path, concurrency: int, max_tokens: int, rounds: int) -> dict[str, float]:
    """Median over rounds that alternate between both ways; the same requests, so the same tokens."""
    checkpoint = Checkpoint(folder)
    with tempfile.TemporaryDirectory() as run_folder:
        vllm = VllmProcess(folder, Path(run_folder) / "vllm.log", "--no-enable-prefix-caching").start()
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        options = ServeOptions(checkpoint=folder, llm="vllm", llm_url=[vllm.url], image_cache_bytes=0, **ports)
        try:
            with launch(options, Path(run_folder)) as server:
                return _measure(checkpoint, server.grpc_url, vllm.url, concurrency, max_tokens, rounds)
        finally:
            vllm.kill()


def _measure(
    checkpoint: Checkpoint, grpc_url: str, vllm_url: str, concurrency: int, max_tokens: int, rounds: int
) -> dict[str, float]:
    questions = [QUESTION.format(number) for number in range(concurrency)]
    images = [_picture(number) for number in range(concurrency)]
    bodies = asyncio.run(_bodies(Direct(checkpoint, vllm_url), grpc_url, questions, images, max_tokens))
    ways = {
        "direct": lambda: asyncio.run(Direct(checkpoint, vllm_url).ask_all(bodies)),
        "triton": lambda: asyncio.run(ask_triton(grpc_url, questions, images, max_tokens)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            start = time.perf_counter()
            tokens = work()
            if number:  # the first round warms up
                speeds[name].append(tokens / (time.perf_counter() - start))
        if number:
            print(
                f"round {number}: direct {speeds['direct'][-1]:.0f}, through Triton {speeds['triton'][-1]:.0f} tokens/s"
            )
    ratios = [through / direct for through, direct in zip(speeds["triton"], speeds["direct"], strict=True)]
    return {
        "triton_over_vllm": float(np.median(ratios)),
        "direct_tokens_per_s": float(np.median(speeds["direct"])),
        "triton_tokens_per_s": float(np.median(speeds["triton"])),
    }


async def _bodies(
    direct: Direct, grpc_url: str, questions: list[str], images: list[bytes], max_tokens: int
) -> list[bytes]:
    async with AsyncKimiClient(grpc_url) as client:
        rows = [torch.from_numpy(embeds).bfloat16() for embeds in await client.embed(images)]
    return [
        direct.body(question, image, embeds, max_tokens)
        for question, image, embeds in zip(questions, images, rows, strict=True)
    ]


def _picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
