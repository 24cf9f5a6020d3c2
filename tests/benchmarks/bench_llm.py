# SPDX-License-Identifier: Apache-2.0
"""`make bench-llm`: the transformers engine with 8 requests at once over one at a time, and Triton over bare vLLM.

The first runs the demo model; the second a tiny random one whose answers never end early, unless one is named.
The last line is JSON. usage: python -m tests.benchmarks.bench_llm [--checkpoint DIR] [--tokens N] [--rounds N]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.demo import CHECKPOINT
from kimi_triton.demo.tiny import write_tiny_checkpoint
from kimi_triton.llm.assembly import transformers_step
from kimi_triton.llm.request import LlmRequest
from kimi_triton.llm.step import LlmStep
from tests.benchmarks.llm_through_triton import measure
from tests.benchmarks.measure import VLLM_PYTHON, finish, surroundings
from tests.llm.scripted import RecordingCaller, llm_request
from tests.vllm.endless import make_endless

CONCURRENCY = 8
NUM_PROMPT_TOKENS = 64
TIMEOUT_S = 600.0


def requests(checkpoint: Checkpoint, max_tokens: int) -> list[LlmRequest]:
    """Greedy text prompts of random bytes."""
    generator = torch.Generator().manual_seed(0)
    no_rows = torch.zeros(0, checkpoint.config.text_hidden_size)
    prompts = torch.randint(256, (CONCURRENCY, NUM_PROMPT_TOKENS), generator=generator).tolist()
    return [llm_request(ids, no_rows, max_tokens=max_tokens, stream=True) for ids in prompts]


def tokens_per_second(step: LlmStep, given: list[LlmRequest], together: bool) -> float:
    callers = []
    start = time.perf_counter()
    for request in given:
        callers.append(RecordingCaller())
        step.submit(request, callers[-1])
        if not together:
            callers[-1].done.wait(TIMEOUT_S)
    for caller in callers:
        caller.done.wait(TIMEOUT_S)
    elapsed = time.perf_counter() - start
    tokens = [caller.wait().completion_tokens for caller in callers]
    if len(set(tokens)) > 1 or tokens[0] < 32:
        raise RuntimeError(
            f"answers of {tokens} tokens say little about decoding; they should all have the full length"
        )
    return sum(tokens) / elapsed


def endless_demo_model() -> Path:
    """The demo model with its stop tokens made unlikely: it would answer nonsense with a word or two."""
    return make_endless(Path(shutil.copytree(CHECKPOINT, Path(tempfile.mkdtemp()) / "demo")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, help="for both, instead of the demo model and a random one")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    checkpoint = Checkpoint(arguments.checkpoint or endless_demo_model())
    step = transformers_step(checkpoint, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    step.start()
    given = requests(checkpoint, arguments.tokens)
    tokens_per_second(step, given, together=True)  # warm up
    rounds = []
    for number in range(arguments.rounds):
        serial, batched = (tokens_per_second(step, given, together) for together in (False, True))
        rounds.append((batched / serial, serial, batched))
        print(f"round {number + 1}: one at a time {serial:.0f} tokens/s, {CONCURRENCY} at once {batched:.0f} tokens/s")
    step.stop()
    ratio, serial, batched = sorted(rounds)[len(rounds) // 2]
    result = {"batched_over_serial": ratio, "serial_tokens_per_s": serial, "batched_tokens_per_s": batched}
    if VLLM_PYTHON.exists():
        folder = arguments.checkpoint or make_endless(write_tiny_checkpoint(Path(tempfile.mkdtemp())))
        result |= measure(folder, CONCURRENCY, arguments.tokens, arguments.rounds)
    else:
        print("no vLLM beside us: run `make vllm-env` for the rest")
    finish(**{name: round(value, 3) for name, value in result.items()}, **surroundings(concurrency=CONCURRENCY))


if __name__ == "__main__":
    main()
