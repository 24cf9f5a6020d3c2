# SPDX-License-Identifier: Apache-2.0
"""Counts and times of the LLM step, whatever way a request ends."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

from kimi_triton.errors import Cancelled, KimiError, Unavailable
from kimi_triton.llm.engine import FinishReason, Token
from kimi_triton.llm.metrics import LLM_METRICS, LlmMetrics, MeasuredSink
from tests.llm.scripted import RecordingSink


class Series:
    """One metric that writes down what it is told; refuses what its kind cannot do."""

    def __init__(self, kind: str) -> None:
        self.kind, self.value, self.observed = kind, 0.0, list[float]()

    def increment(self, value: float) -> None:
        assert self.kind == "counter"
        assert value > 0
        self.value += value

    def set(self, value: float) -> None:
        assert self.kind == "gauge"
        self.value = value

    def observe(self, value: float) -> None:
        assert self.kind == "histogram"
        self.observed.append(value)


@pytest.fixture
def series() -> dict[str, Series]:
    return {spec.name: Series(spec.kind) for spec in LLM_METRICS}


@pytest.fixture
def metrics(series: dict[str, Series]) -> LlmMetrics:
    return LlmMetrics(series)


def values(series: dict[str, Series]) -> dict[str, float]:
    found = defaultdict(float)
    for name, one in series.items():
        if one.value:
            found[name.removeprefix("kimi_llm_")] = one.value
    return dict(found)


def measured(metrics: LlmMetrics, received_s: float | None = None, wanted: int = 10**9) -> MeasuredSink:
    return metrics.measure(RecordingSink(wanted), 7, received_s)


def test_a_request_moves_from_waiting_to_running_and_away(metrics: LlmMetrics, series: dict[str, Series]) -> None:
    sink = measured(metrics)
    metrics.publish(True)
    assert values(series) == {"requests": 1, "prompt_tokens": 7, "waiting": 1, "healthy": 1}
    assert sink.on_token(Token(1))
    metrics.publish(True)
    assert (series["kimi_llm_waiting"].value, series["kimi_llm_running"].value) == (0, 1)
    sink.on_token(Token(2, None, "length"))
    metrics.publish(False)
    assert values(series) == {"requests": 1, "prompt_tokens": 7, "completion_tokens": 2}
    assert len(series["kimi_llm_time_to_first_token_ms"].observed) == 1
    assert len(series["kimi_llm_inter_token_ms"].observed) == 1


def test_times_are_milliseconds_since_the_first_step(metrics: LlmMetrics, series: dict[str, Series]) -> None:
    sink = measured(metrics, received_s=time.monotonic() - 2)
    sink.on_token(Token(1))
    time.sleep(0.02)
    sink.on_token(Token(2))
    metrics.publish(True)
    assert 2000 <= series["kimi_llm_time_to_first_token_ms"].observed[0] < 3000
    assert 20 <= series["kimi_llm_inter_token_ms"].observed[0] < 1000


def test_tokens_that_come_together_share_the_time_since_those_before(
    metrics: LlmMetrics, series: dict[str, Series]
) -> None:
    sink = measured(metrics)
    for more in (True, False):
        sink.on_token(Token(1), more)
    time.sleep(0.1)
    for more in (True, True, True, False):
        sink.on_token(Token(1), more)
    metrics.publish(True)
    assert series["kimi_llm_completion_tokens"].value == 6
    assert len(series["kimi_llm_time_to_first_token_ms"].observed) == 1
    (shared,) = series["kimi_llm_inter_token_ms"].observed
    assert 25 <= shared < 250


def test_tokens_before_a_stop_string_are_counted_though_more_would_follow(
    metrics: LlmMetrics, series: dict[str, Series]
) -> None:
    sink = measured(metrics, wanted=2)
    assert sink.on_token(Token(1), more=True)
    assert not sink.on_token(Token(2), more=True)
    metrics.publish(False)
    assert values(series) == {"requests": 1, "prompt_tokens": 7, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("how", "counted"),
    [
        ("stop", {}),
        ("length", {}),
        ("cancelled", {"cancelled": 1}),
        ("deadline", {"overdue": 1}),
        (Unavailable("vLLM died"), {"errors": 1}),
        (KimiError("a defect"), {"errors": 1}),
        (Cancelled("gone"), {"cancelled": 1}),
    ],
)
@pytest.mark.parametrize("tokens", [0, 3])
def test_every_end_is_counted_once_and_leaves_no_gauge_up(
    how: FinishReason | KimiError, counted: dict[str, int], tokens: int, metrics: LlmMetrics, series: dict[str, Series]
) -> None:
    sink = measured(metrics)
    for _ in range(tokens):
        sink.on_token(Token(1))
    if isinstance(how, KimiError):
        sink.on_error(how)
    else:
        sink.on_end(how)
    metrics.publish(False)
    sampled = {"completion_tokens": tokens} if tokens else {}
    assert values(series) == {"requests": 1, "prompt_tokens": 7} | sampled | counted


def test_a_stop_string_and_a_refusal_leave_no_gauge_up(metrics: LlmMetrics, series: dict[str, Series]) -> None:
    assert not measured(metrics, wanted=1).on_token(Token(1))
    measured(metrics).refuse()
    metrics.publish(False)
    assert values(series) == {"requests": 2, "prompt_tokens": 14, "completion_tokens": 1, "refused": 1}


def test_nothing_is_sent_twice(metrics: LlmMetrics, series: dict[str, Series]) -> None:
    measured(metrics).on_token(Token(1))
    for _ in range(3):
        metrics.publish(True)
    assert series["kimi_llm_requests"].value == 1
    assert len(series["kimi_llm_time_to_first_token_ms"].observed) == 1
