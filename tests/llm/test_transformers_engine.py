# SPDX-License-Identifier: Apache-2.0
"""The engine over a scripted model: who runs, who ends and why, whatever goes wrong next to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kimi_triton.errors import ConfigError, InvalidRequest, KimiError, Unavailable
from kimi_triton.llm.engine import Token
from kimi_triton.llm.scheduler import EngineLimits
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.llm.transformers_engine import TransformersEngine
from tests.llm.scripted import RecordingSink, Script, ScriptedDecoder, greedy, token_request

EOS, IM_END, MEDIA, BLOCKED = 501, 502, 503, 504
ROLES = TokenRoles(
    stop=frozenset((EOS, IM_END)),
    think_start=None,
    think_end=None,
    shown=frozenset(),
    blocked=frozenset((MEDIA, BLOCKED)),
)


def counting(ids: list[int]) -> int:
    """Each answer counts on from the first id of its prompt, by the length of the text: any mix-up shows."""
    return (ids[0] + len(ids)) % 500


def expected_count(prompt: list[int], num_tokens: int) -> list[int]:
    return [(prompt[0] + len(prompt) + done) % 500 for done in range(num_tokens)]


class Engines:
    """Starts engines and stops all of them."""

    def __init__(self) -> None:
        self.started: list[TransformersEngine] = []

    def __call__(
        self, decoder: ScriptedDecoder | Script, context_length: int = 4096, **limits: int
    ) -> TransformersEngine:
        if not isinstance(decoder, ScriptedDecoder):
            decoder = ScriptedDecoder(decoder)
        engine = TransformersEngine(
            decoder,
            roles=ROLES,
            media_token_id=MEDIA,
            context_length=context_length,
            limits=EngineLimits(**limits),
        )
        engine.start()
        self.started.append(engine)
        return engine


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    for engine in engines.started:
        engine.stop()


def submit(engine: TransformersEngine, ids: list[int], request_id: str = "r", **changes: object) -> RecordingSink:
    sink = RecordingSink()
    engine.submit(token_request(ids, request_id, **changes), sink)
    return sink


def test_answers_of_many_mixed_requests_are_their_own(engines: Engines) -> None:
    engine = engines(counting, max_running=5, max_waiting=100, prefill_tokens=7)
    generator = torch.Generator().manual_seed(0)
    sinks = []
    for index in range(64):
        length, tokens = torch.randint(1, 30, (2,), generator=generator).tolist()
        ids = [index * 7 % 500, *range(length)]
        sinks.append((submit(engine, ids, str(index), max_tokens=tokens), expected_count(ids, tokens)))
    for sink, expected in sinks:
        assert sink.wait() == "length"
        assert sink.ids == expected


def test_waiting_requests_are_decoded_in_the_same_steps(engines: Engines) -> None:
    decoder = ScriptedDecoder(counting, step_s=0.01)
    engine = engines(decoder)
    for sink in [submit(engine, [index, 1, 2], str(index), max_tokens=20) for index in range(8)]:
        sink.wait()
    assert len(decoder.steps) <= 24
    assert max(len(step) for step in decoder.steps) == 8


def test_the_prompt_is_computed_once(engines: Engines) -> None:
    decoder = ScriptedDecoder(counting)
    submit(engines(decoder), list(range(50)), max_tokens=10).wait()
    assert sum(segment.length for step in decoder.steps for segment in step) == 50 + 9


def test_a_long_prompt_does_not_hold_up_the_others(engines: Engines) -> None:
    decoder = ScriptedDecoder(counting, step_s=0.002)
    engine = engines(decoder, prefill_tokens=16)
    short = submit(engine, [1], "short", max_tokens=40)
    long = submit(engine, list(range(499)), "long", max_tokens=1)
    assert short.wait() == "length"
    assert long.wait() == "length"
    mixed = [step for step in decoder.steps if sum(segment.length for segment in step) > 1 and step[0].length == 1]
    assert len(mixed) > 10
    assert max(sum(segment.length for segment in step) for step in decoder.steps) <= 17


def test_a_request_that_ends_makes_room_for_one_that_waits(engines: Engines) -> None:
    engine = engines(ScriptedDecoder(counting, step_s=0.002), max_running=2)
    long = submit(engine, [1], "long", max_tokens=200)
    for index in range(3):
        assert submit(engine, [5], f"short {index}", max_tokens=3).wait() == "length"
    assert not long.done.is_set()


def test_tokens_are_delivered_one_by_one(engines: Engines) -> None:
    gate = threading.Semaphore(0)

    def gated(ids: list[int]) -> int:
        assert gate.acquire(timeout=10)
        return counting(ids)

    sink = submit(engines(gated), [1], max_tokens=5)
    for produced in range(1, 6):
        gate.release()
        until(lambda produced=produced: len(sink.tokens) == produced)
    assert sink.wait() == "length"


def test_h1_both_end_of_turn_and_end_of_text_stop(engines: Engines) -> None:
    for stop_id in (IM_END, EOS):
        script = lambda ids, stop_id=stop_id: stop_id if len(ids) == 5 else 7  # noqa: E731
        sink = submit(engines(script), [1], max_tokens=100)
        assert sink.wait() == "stop"
        assert sink.ids == [7, 7, 7, 7, stop_id]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_h3_an_answer_has_at_most_max_tokens(engines: Engines, max_tokens: int) -> None:
    sink = submit(engines(counting), [1], max_tokens=max_tokens)
    assert sink.wait() == "length"
    assert len(sink.tokens) == max_tokens
    assert [token.finish_reason for token in sink.tokens] == [None] * (max_tokens - 1) + ["length"]


def test_h3_a_single_token_that_is_a_stop_is_a_stop(engines: Engines) -> None:
    assert submit(engines(lambda _: EOS), [1], max_tokens=1).wait() == "stop"


def test_h4_h5_neighbours_do_not_change_a_sampled_answer(engines: Engines) -> None:
    table = torch.randn(700, 600, generator=torch.Generator().manual_seed(0))
    table[:, [EOS, IM_END]] = -100
    engine = engines(lambda ids: table[sum(ids) % 700])
    chosen = [
        greedy(),
        greedy(temperature=1.0, seed=1),
        greedy(temperature=1.0, seed=2),
        greedy(temperature=1e-6, seed=3),
        greedy(temperature=1.0, seed=42, top_p=0.5, top_k=20, min_p=0.01, repetition_penalty=1.3),
    ]

    def answers(together: bool) -> list[list[int]]:
        sinks = []
        for index, options in enumerate(chosen):
            sinks.append(submit(engine, [index, 3], str(index), options=options, max_tokens=20))
            if not together:
                sinks[-1].wait()
        for sink in sinks:
            sink.wait()
        return [sink.ids for sink in sinks]

    alone = answers(together=False)
    assert all(answers(together=True) == alone for _ in range(5))
    assert len({tuple(ids) for ids in alone}) == len(alone)


def test_h5_requests_without_a_seed_differ(engines: Engines) -> None:
    engine = engines(lambda _: torch.zeros(600))
    sinks = [submit(engine, [1], str(index), options=greedy(temperature=1.0)) for index in range(2)]
    for sink in sinks:
        sink.wait()
    assert sinks[0].ids != sinks[1].ids


def test_media_and_blocked_tokens_are_never_sampled(engines: Engines) -> None:
    logits = torch.full((600,), -5.0)
    logits[MEDIA], logits[BLOCKED], logits[9] = 50, 40, 3
    for options in (greedy(), greedy(temperature=2.0, seed=0)):
        sink = submit(engines(lambda _: logits), [1], options=options, max_tokens=50)
        sink.wait()
        assert not {MEDIA, BLOCKED} & set(sink.ids)
    assert submit(engines(lambda _: logits), [1]).wait() == "length"


def test_c2_a_request_with_a_missing_row_fails_alone(engines: Engines) -> None:
    engine = engines(ScriptedDecoder(counting, step_s=0.002))
    neighbours = [
        (submit(engine, [index], str(index), max_tokens=40), expected_count([index], 40)) for index in range(8)
    ]
    for attempt in range(20):
        bad = submit(engine, [1, MEDIA, MEDIA, 2], f"bad {attempt}", image_embeds=torch.ones(1, 1))
        error = bad.wait()
        assert isinstance(error, InvalidRequest)
        assert "2 image placeholders" in str(error)
        assert "1 rows" in str(error)
    for sink, expected in neighbours:
        assert sink.wait() == "length"
        assert sink.ids == expected
    assert engine.is_healthy()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_d1_logits_that_are_not_finite_fail_their_request_alone(engines: Engines, bad: float) -> None:
    def script(ids: list[int]) -> int | torch.Tensor:
        return torch.full((600,), bad) if ids[0] == 13 and len(ids) == 4 else counting(ids)

    engine = engines(ScriptedDecoder(script, step_s=0.002))
    good, broken = submit(engine, [1], "good", max_tokens=20), submit(engine, [13], "broken", max_tokens=20)
    assert "not finite" in str(broken.wait())
    assert len(broken.tokens) == 3
    assert good.wait() == "length"
    assert good.ids == expected_count([1], 20)


def test_g4_a_cancelled_request_stops_within_two_tokens(engines: Engines) -> None:
    engine = engines(ScriptedDecoder(counting, step_s=0.02))
    sink, other = submit(engine, [1], max_tokens=2000), submit(engine, [2], "other", max_tokens=20)
    until(lambda: len(sink.tokens) >= 5)
    seen = len(sink.tokens)
    assert engine.cancel("r")
    assert sink.wait() == "cancelled"
    assert len(sink.tokens) <= seen + 2
    assert not engine.cancel("r")
    assert other.wait() == "length"
    assert other.ids == expected_count([2], 20)


def test_g4_200_cancelled_requests_leave_nothing_behind(engines: Engines) -> None:
    decoder = ScriptedDecoder(counting)
    engine = engines(decoder, max_running=4, max_waiting=300)
    sinks = [submit(engine, [index % 500, 3], str(index), max_tokens=4000) for index in range(200)]
    for index in range(200):
        engine.cancel(str(index))
    assert {sink.wait() for sink in sinks} <= {"cancelled", "length"}
    assert sum(sink.ends == ["cancelled"] for sink in sinks) > 150
    assert submit(engine, [4], "after").wait() == "length"
    until(lambda: not decoder.rows)


def test_g5_an_exception_of_a_sink_ends_its_request_alone(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(RecordingSink):
        def on_token(self, token: Token, more: bool = False) -> bool:
            if len(self.tokens) == 3:
                raise ValueError("the detokeniser broke")
            return super().on_token(token, more)

    engine = engines(ScriptedDecoder(counting, step_s=0.002))
    good, broken = submit(engine, [1], "good", max_tokens=20), Failing()
    engine.submit(token_request([2], "broken", max_tokens=20), broken)
    error = broken.wait()
    assert isinstance(error, KimiError)
    assert str(error).startswith("ValueError; the server's log")
    assert "the detokeniser broke" in caplog.text
    assert good.wait() == "length"


def test_g5_a_failed_forward_pass_is_an_error_for_its_requests_and_not_the_end(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    def script(ids: list[int]) -> int:
        if ids[0] == 66 and len(ids) == 3:
            raise RuntimeError("out of memory")
        return counting(ids)

    engine = engines(script)
    assert "RuntimeError" in str(submit(engine, [66], max_tokens=20).wait())
    sink = submit(engine, [1], max_tokens=5)
    assert sink.wait() == "length"
    assert sink.ids == expected_count([1], 5)
    assert "RuntimeError: out of memory" in caplog.text


def test_a_sink_that_has_enough_ends_its_request(engines: Engines) -> None:
    decoder = ScriptedDecoder(counting)
    engine = engines(decoder)
    sink = RecordingSink(wanted=3)
    engine.submit(token_request([1], max_tokens=1000), sink)
    until(lambda: len(sink.tokens) == 3 and not decoder.rows)
    assert submit(engine, [1], "r").wait() == "length"
    assert len(sink.tokens) == 3
    assert not sink.ends


def test_more_than_the_limits_is_unavailable(engines: Engines) -> None:
    engine = engines(ScriptedDecoder(counting, step_s=0.01), max_running=2, max_waiting=1)
    sinks = [submit(engine, [1], str(index), max_tokens=10) for index in range(3)]
    with pytest.raises(Unavailable, match="3 requests are running or waiting, the limits are 2 and 1"):
        submit(engine, [1], "one too many")
    assert [sink.wait() for sink in sinks] == ["length"] * 3
    assert submit(engine, [1], "later").wait() == "length"


def test_an_id_that_is_live_is_refused_and_free_again_afterwards(engines: Engines) -> None:
    engine = engines(ScriptedDecoder(counting, step_s=0.01))
    first = submit(engine, [1], "same", max_tokens=5)
    with pytest.raises(InvalidRequest, match="request id 'same'"):
        submit(engine, [2], "same")
    assert first.wait() == "length"
    until(lambda: not engine.cancel("same"))
    assert submit(engine, [2], "same").wait() == "length"


def test_a_deadline_ends_a_running_request_and_refuses_a_waiting_one(engines: Engines) -> None:
    engine = engines(ScriptedDecoder(counting, step_s=0.01), max_running=1)
    deadline = time.monotonic() + 0.15
    running = submit(engine, [1], "running", max_tokens=4000, deadline=deadline)
    waiting = submit(engine, [2], "waiting", max_tokens=4000, deadline=deadline)
    assert running.wait() == "deadline"
    assert running.tokens
    assert isinstance(waiting.wait(), Unavailable)
    assert time.monotonic() < deadline + 1


def test_the_cache_budget_holds_requests_back(engines: Engines) -> None:
    decoder = ScriptedDecoder(counting, step_s=0.001)
    engine = engines(decoder, context_length=100, cache_tokens=100)
    sinks = [submit(engine, [1] * 30, str(index), max_tokens=20) for index in range(4)]
    for sink in sinks:
        assert sink.wait() == "length"
    assert max(len(step) for step in decoder.steps) == 2


def test_stopping_tells_every_request(engines: Engines) -> None:
    engine = engines(ScriptedDecoder(counting, step_s=0.01), max_running=1)
    sinks = [submit(engine, [1], str(index), max_tokens=4000) for index in range(3)]
    engine.stop()
    assert all(isinstance(sink.wait(), Unavailable) for sink in sinks)
    assert not engine.is_healthy()
    with pytest.raises(Unavailable):
        submit(engine, [1], "after")


def test_a_cache_smaller_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_tokens is 10, one request can need 100"):
        TransformersEngine(
            ScriptedDecoder(counting),
            roles=ROLES,
            media_token_id=MEDIA,
            context_length=100,
            limits=EngineLimits(cache_tokens=10),
        )


def until(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)
