# SPDX-License-Identifier: Apache-2.0
"""What the LLM step publishes on Triton's metrics endpoint: the same numbers whichever engine runs.

Each value is a message from the stub to the server, so the engine's thread only notes it down; another one publishes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping

from kimi_triton.errors import Cancelled, KimiError
from kimi_triton.llm.engine import FinishReason, Token, TokenSink
from kimi_triton.metric import Metric, MetricSpec

LLM_METRICS = (
    MetricSpec("kimi_llm_requests", "counter", "Requests that came with a prompt that fits"),
    MetricSpec("kimi_llm_refused", "counter", "Requests that were wrong, or one too many"),
    MetricSpec("kimi_llm_cancelled", "counter", "Requests that were cancelled"),
    MetricSpec("kimi_llm_overdue", "counter", "Answers that ended at their deadline"),
    MetricSpec("kimi_llm_errors", "counter", "Requests that an error ended after an engine took them in"),
    MetricSpec("kimi_llm_prompt_tokens", "counter", "Tokens of prompts with their images"),
    MetricSpec("kimi_llm_completion_tokens", "counter", "Sampled tokens"),
    MetricSpec("kimi_llm_waiting", "gauge", "Requests without a token yet"),
    MetricSpec("kimi_llm_running", "gauge", "Requests between their first and their last token"),
    MetricSpec("kimi_llm_healthy", "gauge", "1 while a request that came now could be answered"),
    MetricSpec(
        "kimi_llm_time_to_first_token_ms",
        "histogram",
        "Milliseconds from the first step of the ensemble to the first token",
        (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000),
    ),
    MetricSpec(
        "kimi_llm_inter_token_ms",
        "histogram",
        "Milliseconds from one token to the next, the mean of those that came together",
        (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000),
    ),
)


class LlmMetrics:
    """Notes what happens and publishes it when told to. Without `metrics` it only keeps the gauges."""

    def __init__(self, metrics: Mapping[str, Metric] | None = None) -> None:
        """`metrics` by the names of LLM_METRICS."""
        self._metrics = metrics
        self._lock = threading.Lock()
        self._counted: Counter[str] = Counter()
        self._observed: list[tuple[str, float]] = []
        self._gauges = {"waiting": 0, "running": 0}
        self._published: dict[str, int] = {}

    def measure(self, sink: TokenSink, prompt_tokens: int, received_s: float | None) -> MeasuredSink:
        """A sink that notes what passes through it, for a request that is about to go to an engine."""
        return MeasuredSink(sink, self, prompt_tokens, received_s)

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counted[name] += amount

    def note_tokens(self, number: int, name: str, seconds: float) -> None:
        """Tokens that came together, and a time to observe."""
        with self._lock:
            self._counted["completion_tokens"] += number
            self._observed.append((name, 1000 * seconds))

    def move(self, source: str | None, target: str | None) -> None:
        """A request goes from one gauge to another."""
        with self._lock:
            for name, change in ((source, -1), (target, 1)):
                if name is not None:
                    self._gauges[name] += change

    def publish(self, is_healthy: bool) -> None:
        """Send what has changed since the last time."""
        with self._lock:
            self._gauges["healthy"] = int(is_healthy)
            counted, self._counted = self._counted, Counter()
            observed, self._observed = self._observed, []
            gauges = {name: value for name, value in self._gauges.items() if self._published.get(name) != value}
            self._published |= gauges
        if self._metrics is None:
            return
        for name, amount in counted.items():
            self._metrics[f"kimi_llm_{name}"].increment(amount)
        for name, value in observed:
            self._metrics[f"kimi_llm_{name}"].observe(value)
        for name, number in gauges.items():
            self._metrics[f"kimi_llm_{name}"].set(number)

    def close(self) -> None:
        """Let go of the metrics. Triton's stub dies of those that are still there when it ends."""
        self._metrics = None


class MeasuredSink:
    """Passes tokens on to another TokenSink, and what it sees to LlmMetrics."""

    def __init__(self, sink: TokenSink, metrics: LlmMetrics, prompt_tokens: int, received_s: float | None) -> None:
        self._sink = sink
        self._metrics = metrics
        self._place: str | None = "waiting"
        self._num_new = 0  # tokens that belong together and are not noted yet
        self._last_s = time.monotonic() if received_s is None else received_s
        metrics.count("requests")
        metrics.count("prompt_tokens", prompt_tokens)
        metrics.move(None, "waiting")

    def refuse(self) -> None:
        """The engine did not take the request in."""
        self._metrics.count("refused")
        self._leave()

    def on_token(self, token: Token, more: bool = False) -> bool:
        self._num_new += 1
        if not more:
            self._note_tokens()
        wants_more = self._sink.on_token(token, more)
        if token.finish_reason is not None or not wants_more:
            self._leave()
        return wants_more

    def on_end(self, reason: FinishReason) -> None:
        if reason in ("cancelled", "deadline"):
            self._metrics.count("cancelled" if reason == "cancelled" else "overdue")
        self._leave()
        self._sink.on_end(reason)

    def on_error(self, error: KimiError) -> None:
        self._metrics.count("cancelled" if isinstance(error, Cancelled) else "errors")
        self._leave()
        self._sink.on_error(error)

    def _note_tokens(self) -> None:
        now = time.monotonic()
        waited_s, number = now - self._last_s, self._num_new
        if self._place == "waiting":
            self._metrics.note_tokens(number, "time_to_first_token_ms", waited_s)
            self._metrics.move("waiting", "running")
            self._place = "running"
        else:
            self._metrics.note_tokens(number, "inter_token_ms", waited_s / number)
        self._last_s, self._num_new = now, 0

    def _leave(self) -> None:
        if self._num_new:
            self._note_tokens()
        self._metrics.move(self._place, None)
        self._place = None
