# SPDX-License-Identifier: Apache-2.0
"""Which requests run, and which of their tokens go into the next forward pass. No tensors are computed here.

Every running request owns one row of the cache; rows are kept without gaps. A step takes one token of each request
that is past its prompt, and beside them at most `prefill_tokens` of prompts, oldest request first: a long prompt is
spread over many steps, between which the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from kimi_triton.errors import ConfigError
from kimi_triton.llm.engine import TokenRequest, TokenSink
from kimi_triton.llm.latent_cache import Segment
from kimi_triton.llm.sampling import TokenSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much an engine takes on at once."""

    max_running: int = 16
    max_waiting: int = 256
    prefill_tokens: int = 512  # prompt tokens of one step
    cache_tokens: int = 524_288  # running requests times the longest of them, prompt and answer

    def __post_init__(self) -> None:
        for name in ("max_running", "prefill_tokens", "cache_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}, expected at least 0")


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request on its way through the engine."""

    request: TokenRequest
    sink: TokenSink
    row: int = -1
    num_cached: int = 0
    num_sampled: int = 0
    last_token: int = -1
    prompt_rows: Tensor | None = None  # (num_prompt_tokens, hidden) until they are all cached
    sampler: TokenSampler = field(init=False)

    @property
    def num_prompt(self) -> int:
        return len(self.request.input_ids)

    @property
    def capacity(self) -> int:
        """Tokens it can come to need in the cache."""
        return self.num_prompt + self.request.max_tokens

    @property
    def decodes(self) -> bool:
        return self.num_cached >= self.num_prompt


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Requests of one forward pass with their segments, the decoding ones first."""

    requests: list[LiveRequest]
    segments: list[Segment]
    num_decode: int

    def __iter__(self) -> Iterator[tuple[LiveRequest, Segment]]:
        return zip(self.requests, self.segments, strict=True)

    @property
    def longest(self) -> int:
        return max(segment.end for segment in self.segments)


class Scheduler:
    """The waiting line and the running requests; used by one thread."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []  # the index is the row
        self._prefilling: list[LiveRequest] = []  # oldest first

    def next_admitted(self) -> LiveRequest | None:
        """Move the oldest waiting request to the running ones if there is room for it."""
        if not self.waiting or len(self.running) >= self._limits.max_running:
            return None
        longest = max(live.capacity for live in (self.waiting[0], *self.running))
        if self.running and (len(self.running) + 1) * longest > self._limits.cache_tokens:
            return None
        live = self.waiting.popleft()
        live.row = len(self.running)
        self.running.append(live)
        self._prefilling.append(live)
        return live

    def plan(self) -> StepPlan | None:
        """The next step, None when nothing runs."""
        requests = [live for live in self.running if live.decodes]
        segments = [Segment(live.row, live.num_cached, 1) for live in requests]
        num_decode, budget = len(requests), self._limits.prefill_tokens
        self._prefilling = [live for live in self._prefilling if not live.decodes]
        for live in self._prefilling:
            if not budget:
                break
            length = min(budget, live.num_prompt - live.num_cached)
            requests.append(live)
            segments.append(Segment(live.row, live.num_cached, length))
            budget -= length
        return StepPlan(requests, segments, num_decode) if requests else None

    def remove(self, live: LiveRequest) -> LiveRequest | None:
        """Take a request out. The running one in the last row, returned if it is another, inherits the row."""
        if live.row < 0:
            self.waiting.remove(live)
            return None
        if live in self._prefilling:
            self._prefilling.remove(live)
        last = self.running.pop()
        if last is live:
            return None
        last.row = live.row
        self.running[live.row] = last
        return last
