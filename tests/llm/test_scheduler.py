# SPDX-License-Identifier: Apache-2.0
"""Plans of the scheduler, checked over random lives of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.errors import ConfigError
from kimi_triton.llm.scheduler import EngineLimits, LiveRequest, Scheduler
from tests.llm.scripted import RecordingSink, token_request


def live(num_prompt: int, max_tokens: int = 8) -> LiveRequest:
    return LiveRequest(token_request([1] * num_prompt, max_tokens=max_tokens), RecordingSink())


def admit_all(scheduler: Scheduler) -> list[LiveRequest]:
    admitted = []
    while one := scheduler.next_admitted():
        admitted.append(one)
    return admitted


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), max_size=20), st.integers(1, 4), st.integers(1, 16))
def test_every_request_runs_to_its_end_in_gapless_rows(
    sizes: list[tuple[int, int]], max_running: int, prefill_tokens: int
) -> None:
    scheduler = Scheduler(EngineLimits(max_running=max_running, prefill_tokens=prefill_tokens))
    requests = [live(num_prompt, max_tokens) for num_prompt, max_tokens in sizes]
    scheduler.waiting.extend(requests)
    for _ in range(2000):
        admit_all(scheduler)
        plan = scheduler.plan()
        if plan is None:
            break
        assert len(scheduler.running) <= max_running
        assert [one.row for one in scheduler.running] == list(range(len(scheduler.running)))
        assert [segment.length for segment in plan.segments[: plan.num_decode]] == [1] * plan.num_decode
        assert sum(segment.length for segment in plan.segments[plan.num_decode :]) <= prefill_tokens
        for one, segment in plan:
            assert (segment.row, segment.start) == (one.row, one.num_cached)
            one.num_cached = segment.end
            one.num_sampled += one.decodes
        for one in plan.requests:
            if one.num_sampled == one.request.max_tokens:
                moved = scheduler.remove(one)
                assert moved is None or scheduler.running[moved.row] is moved
    assert not scheduler.running
    assert not scheduler.waiting
    for one in requests:
        assert one.num_sampled == one.request.max_tokens
        assert one.num_cached == one.num_prompt + one.request.max_tokens - 1


def test_requests_are_let_in_in_the_order_they_came() -> None:
    scheduler = Scheduler(EngineLimits(max_running=2))
    requests = [live(3) for _ in range(4)]
    scheduler.waiting.extend(requests)
    assert admit_all(scheduler) == requests[:2]
    scheduler.remove(requests[0])
    assert admit_all(scheduler) == [requests[2]]


def test_the_oldest_prompt_goes_first() -> None:
    scheduler = Scheduler(EngineLimits(prefill_tokens=10))
    first, second = live(8), live(8)
    scheduler.waiting.extend([first, second])
    admit_all(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    assert [(one, segment.length) for one, segment in plan] == [(first, 8), (second, 2)]


def test_the_longest_request_counts_for_all_rows_of_the_cache() -> None:
    scheduler = Scheduler(EngineLimits(cache_tokens=100))
    long, short = live(60), live(2)
    scheduler.waiting.extend([long, short])
    assert admit_all(scheduler) == [long]  # two rows of 68 would be 136
    scheduler.remove(long)
    assert admit_all(scheduler) == [short]


def test_a_waiting_request_can_leave() -> None:
    scheduler = Scheduler(EngineLimits(max_running=1))
    first, second = live(3), live(3)
    scheduler.waiting.extend([first, second])
    admit_all(scheduler)
    assert scheduler.remove(second) is None
    assert not scheduler.waiting


@pytest.mark.parametrize(
    ("limit", "value"), [("max_running", 0), ("max_waiting", -1), ("prefill_tokens", 0), ("cache_tokens", 0)]
)
def test_limits_that_would_serve_nobody_are_refused(limit: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{limit} is {value}"):
        EngineLimits(**{limit: value})
