# SPDX-License-Identifier: Apache-2.0
"""The step over a scripted model: exactly one final response on every path, and bad requests that stay alone.

Every test runs with both engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_triton.cancel_board import CancelBoard
from kimi_triton.config import CheckpointConfig
from kimi_triton.errors import InvalidRequest, KimiError, Unavailable
from kimi_triton.llm.answer import Answer
from kimi_triton.llm.engine import Engine
from kimi_triton.llm.scheduler import EngineLimits
from kimi_triton.llm.step import POLL_INTERVAL_S, LlmStep
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.llm.transformers_engine import TransformersEngine
from kimi_triton.llm.vllm_body import RequestBody
from kimi_triton.llm.vllm_engine import VllmEngine
from kimi_triton.llm.vllm_servers import VllmSettings
from kimi_triton.text.tokenizer import KimiTokenizer
from tests.llm.fake_vllm import FakeVllm, rows_of
from tests.llm.scripted import RecordingCaller, ScriptedDecoder, llm_request
from tests.llm.test_stop_strings import cut

NO_ROWS = torch.zeros(0, 1)
CONTEXT = 100


class Stage:
    """An LlmStep whose model says what `answers` has for the first id of a prompt, then ends its turn.

    With the engine "vllm" the model sits behind a stand-in for a vLLM server.
    """

    decoder: ScriptedDecoder

    def __init__(self, folder: Path, board: CancelBoard, engine: str, step_s: float = 0.0) -> None:
        config = CheckpointConfig.from_checkpoint(folder)
        self.tokenizer = KimiTokenizer.from_checkpoint(folder, config)
        self.media_id = config.media_placeholder_token_id
        self.roles = TokenRoles.from_checkpoint(folder, config, self.tokenizer)
        self.answers: dict[int, list[int]] = {}
        self.board = board
        self.step = LlmStep(ENGINES[engine](self, step_s), self.tokenizer, self.roles, self.media_id, board)
        self.step.start()

    def stop(self) -> None:
        self.step.stop()
        if isinstance(self.decoder, FakeVllm):
            self.decoder.stop()

    def script(self, ids: list[int]) -> int:
        answer = self.answers[ids[0]]
        done = len(ids) - ids[1]  # the second id of our prompts is their length
        return answer[done] if done < len(answer) else self.tokenizer.special("<|im_end|>")

    def prompt(self, answer: str | list[int], *more: int) -> list[int]:
        key = len(self.answers)
        self.answers[key] = self.bytes(answer) if isinstance(answer, str) else answer
        return [key, 2 + len(more), *more]

    def bytes(self, text: str) -> list[int]:
        """One token per byte."""
        return [self.tokenizer.encode("A")[0] - 65 + value for value in text.encode()]

    def submit(
        self,
        ids: list[int],
        caller: RecordingCaller | None = None,
        embeds: Tensor = NO_ROWS,
        grids: tuple[tuple[int, int, int], ...] = (),
        request_id: str = "",
        **options: object,
    ) -> RecordingCaller:
        caller = caller or RecordingCaller()
        self.step.submit(llm_request(ids, embeds, grids, request_id, **options), caller)  # type: ignore[arg-type]
        return caller


def scripted_engine(stage: Stage, step_s: float) -> TransformersEngine:
    stage.decoder = ScriptedDecoder(stage.script, stage.tokenizer.vocab_size, step_s)
    return TransformersEngine(
        stage.decoder,
        roles=stage.roles,
        media_token_id=stage.media_id,
        context_length=CONTEXT,
        limits=EngineLimits(max_running=8, max_waiting=8, cache_tokens=1000),
    )


def vllm_engine(stage: Stage, step_s: float) -> VllmEngine:
    stage.decoder = FakeVllm(stage.script, stage.tokenizer.vocab_size, step_s, context=CONTEXT).start()
    return VllmEngine(
        (stage.decoder.url,),
        body=RequestBody(rows_of, stage.roles, stage.media_id),
        stop_ids=stage.roles.stop,
        context_length=1000,
        settings=VllmSettings(max_live=16, retry_after_s=0.01),
    )


ENGINES: dict[str, Callable[[Stage, float], Engine]] = {"transformers": scripted_engine, "vllm": vllm_engine}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def stages(tiny_k25: Path, tmp_path: Path, engine: str) -> Iterator[Callable[..., Stage]]:
    started: list[Stage] = []

    def start(**settings: float) -> Stage:
        started.append(Stage(tiny_k25, CancelBoard(tmp_path / "board"), engine, **settings))
        return started[-1]

    yield start
    for stage in started:
        stage.stop()


@pytest.fixture
def stage(stages: Callable[..., Stage]) -> Stage:
    return stages()


def test_a_whole_answer_is_one_response(stage: Stage) -> None:
    caller = stage.submit(stage.prompt("Hello 图!"))
    final = caller.wait()
    assert len(caller.answers) == 1
    assert final == Answer(
        text="Hello 图!",
        reasoning="",
        finish_reason="stop",
        prompt_tokens=2,
        completion_tokens=11,
        cached_images=0,
        token_ids=(*stage.bytes("Hello 图!"), stage.tokenizer.special("<|im_end|>")),
    )


def test_streamed_pieces_join_to_the_whole_answer_and_the_last_one_is_final(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.02)  # so that not all of it is there when the first piece is read
    whole = stage.submit(stage.prompt("Hello 图!")).wait()
    caller = stage.submit(stage.prompt("Hello 图!"), stream=True)
    final = caller.wait()
    assert caller.text == whole.text
    assert [answer.finish_reason for answer in caller.answers] == [None] * (len(caller.answers) - 1) + ["stop"]
    texts = [answer.text for answer in caller.answers]
    if isinstance(stage.decoder, FakeVllm):  # what came together goes on together
        assert len(texts) > 1
        assert all(texts[:-1])
    else:
        assert texts == ["H", "e", "l", "l", "o", " ", "图", "!", ""]
    assert sum((answer.token_ids for answer in caller.answers), ()) == whole.token_ids
    assert final.completion_tokens == whole.completion_tokens


def test_the_last_token_and_the_final_flag_travel_together(stage: Stage) -> None:
    caller = stage.submit(stage.prompt("abcdef"), stream=True, max_tokens=3)
    assert caller.wait().finish_reason == "length"
    assert caller.text == "abc"
    assert all(answer.text for answer in caller.answers)


def test_reasoning_comes_apart_from_the_answer(stage: Stage, stream: bool) -> None:
    assert stage.roles.think_start is not None
    answer = [*stage.bytes("hm"), stage.roles.think_end or 0, *stage.bytes("yes")]
    caller = stage.submit(stage.prompt(answer, stage.roles.think_start), stream=stream)
    assert caller.wait().finish_reason == "stop"
    assert (caller.text, caller.reasoning) == ("yes", "hm")


def test_stop_strings_end_the_answer(stage: Stage, stream: bool) -> None:
    caller = stage.submit(stage.prompt("one END two and more"), stream=stream, stop=("END", "more"))
    final = caller.wait()
    assert caller.text == "one "
    assert final.finish_reason == "stop"
    assert final.completion_tokens == len("one END")


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=12), st.lists(st.text(alphabet="abé图", min_size=1, max_size=3), max_size=2))
def test_h2_streamed_and_whole_answers_are_the_same_text(shared_stage: Stage, text: str, stops: list[str]) -> None:
    text = text.encode(errors="ignore").decode()
    callers = [
        shared_stage.submit(shared_stage.prompt(text), stop=tuple(stops), stream=stream, max_tokens=90)
        for stream in (False, True)
    ]
    for caller in callers:
        assert caller.wait().finish_reason == "stop"
        assert caller.text == cut(text, stops)[0]


@pytest.fixture(scope="module")
def shared_stage(tiny_k25: Path, tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Stage]:
    stage = Stage(tiny_k25, CancelBoard(tmp_path_factory.mktemp("board")), engine)
    yield stage
    stage.stop()


def test_log_probabilities_come_with_their_tokens(stage: Stage, stream: bool) -> None:
    caller = stage.submit(stage.prompt("abc"), stream=stream, logprobs=True)
    caller.wait()
    for answer in caller.answers:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        assert all(-1 < value <= 0 for value in answer.logprobs)
    assert stage.submit(stage.prompt("abc")).wait().logprobs is None


@pytest.mark.parametrize("max_tokens", [1, 2, 98, 99, 2**31])
def test_h3_an_answer_is_cut_to_max_tokens_and_to_the_context(stage: Stage, stream: bool, max_tokens: int) -> None:
    caller = stage.submit(stage.prompt("x" * 500), stream=stream, max_tokens=max_tokens)
    final = caller.wait()
    assert final.finish_reason == "length"
    assert final.completion_tokens == len(caller.text) == min(max_tokens, CONTEXT - 2)


def test_h3_a_request_without_max_tokens_gets_the_default(stage: Stage) -> None:
    assert stage.submit(stage.prompt("ok")).wait().text == "ok"


@pytest.mark.parametrize("generation", [b"{", b"[]", b'{"max_tokens": 0}', b'{"colour": 1}', b'{"top_p": 0}', b"\xff"])
def test_bad_options_are_refused(stage: Stage, generation: bytes) -> None:
    caller = RecordingCaller()
    request = llm_request(stage.prompt("ok"), NO_ROWS)
    stage.step.submit(type(request)(**{**fields_of(request), "generation": generation}), caller)
    with pytest.raises(InvalidRequest):
        caller.wait()


def fields_of(request: object) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}  # type: ignore[attr-defined]


def test_h6_a_prompt_must_leave_room_in_the_context(stage: Stage) -> None:
    assert stage.submit(stage.prompt("ok", *[5] * (CONTEXT - 3))).wait().completion_tokens == 1
    for length in (CONTEXT, CONTEXT + 1):
        caller = stage.submit(stage.prompt("ok", *[5] * (length - 2)))
        with pytest.raises(InvalidRequest, match=rf"{length} tokens with its images, at most 99 fit .* context of 100"):
            caller.wait()


@pytest.mark.parametrize(("ids", "message"), [([], "at least one"), ([-1, 2], "from -1 to 2"), ([1, 99999], "99999")])
def test_ids_outside_the_vocabulary_are_refused(stage: Stage, ids: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        stage.submit(ids).wait()


def test_c2_a_request_with_a_row_too_few_fails_alone(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.002)
    neighbours = [
        stage.submit(stage.prompt(f"neighbour {index} " * 3), stream=True, max_tokens=90) for index in range(7)
    ]
    for _ in range(20):
        ids = stage.prompt("never", *[stage.media_id] * 4)
        with pytest.raises(InvalidRequest, match="4 image placeholders, but image_embeds has 3 rows"):
            stage.submit(ids, embeds=torch.ones(3, 1), grids=((1, 4, 4),)).wait()
    for index, caller in enumerate(neighbours):
        assert caller.wait().finish_reason == "stop"
        assert caller.text == f"neighbour {index} " * 3
    assert stage.step.engine.is_healthy()


def test_rows_that_are_not_finite_fail_their_request_alone(stage: Stage) -> None:
    ids = stage.prompt("never", *[stage.media_id] * 4)
    with pytest.raises(KimiError, match="4 rows of 4 with values that are not finite"):
        stage.submit(ids, embeds=torch.full((4, 1), torch.nan), grids=((1, 4, 4),)).wait()
    assert stage.submit(stage.prompt("ok")).wait().text == "ok"


def test_usage_counts_expanded_images(stage: Stage) -> None:
    caller = stage.submit(
        stage.prompt("ok", *[stage.media_id] * 4), embeds=torch.full((4, 1), float(stage.media_id)), grids=((1, 4, 4),)
    )
    assert caller.wait().prompt_tokens == 6


def test_g4_a_caller_that_goes_away_stops_its_generation(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.01)
    caller = stage.submit(stage.prompt("x" * 90), stream=True)
    wait_for(lambda: len(caller.answers) >= 5)
    caller.gone = True
    final = caller.wait()
    assert final.finish_reason == "cancelled"
    assert final.completion_tokens < 30
    wait_for(lambda: not stage.decoder.rows)


def test_g4_a_cancellation_by_id_stops_within_three_tokens(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.02)
    caller = stage.submit(stage.prompt("x" * 90), stream=True, request_id="mine")
    wait_for(lambda: len(caller.answers) >= 5)
    seen = caller.answers[-1].completion_tokens
    assert stage.step.cancel("mine")
    final = caller.wait()
    assert final.finish_reason == "cancelled"
    assert final.completion_tokens <= seen + 3
    assert not stage.step.cancel("mine")


def test_g4_a_cancellation_on_the_board_stops_within_three_tokens(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.02)
    caller = stage.submit(stage.prompt("x" * 90), stream=True, request_id="mine")
    wait_for(lambda: len(caller.answers) >= 5)
    seen = caller.answers[-1].completion_tokens
    stage.board.post("mine")
    final = caller.wait()
    assert final.finish_reason == "cancelled"
    assert final.completion_tokens <= seen + 3
    wait_for(lambda: stage.board.outcome("mine") is True)


def test_g4_a_late_cancellation_does_not_hit_the_next_request_of_its_id(stage: Stage) -> None:
    assert stage.submit(stage.prompt("ok"), request_id="1").wait().text == "ok"
    stage.board.post("1")
    wait_for(lambda: stage.board.outcome("1") is False)
    assert stage.submit(stage.prompt("ok"), request_id="1").wait().text == "ok"


def test_g4_nothing_is_left_to_cancel_once_the_caller_has_its_answer(stage: Stage, stream: bool) -> None:
    class Late(RecordingCaller):
        """Cancels on receiving its final response, when the engine has not put the request away yet."""

        def respond(self, answer: Answer, final: bool) -> None:
            super().respond(answer, final)
            if final:
                outcomes.append(stage.step.cancel("1"))

    outcomes: list[bool] = []
    time.sleep(2 * POLL_INTERVAL_S)
    caller = Late()
    assert stage.submit(stage.prompt("ok " * 20), caller, request_id="1", stream=stream).wait().finish_reason == "stop"
    wait_for(lambda: outcomes == [False])


def test_a_cancellation_is_left_for_the_steps_before_until_its_request_comes(stage: Stage) -> None:
    stage.board.post("elsewhere")
    time.sleep(5 * POLL_INTERVAL_S)
    assert stage.board.is_posted("elsewhere")


def test_g4_a_cancellation_can_come_before_its_request(stage: Stage, stream: bool) -> None:
    stage.board.post("later")
    final = stage.submit(stage.prompt("ok"), request_id="later", stream=stream).wait()
    assert (final.finish_reason, final.text, final.completion_tokens) == ("cancelled", "", 0)
    assert not stage.decoder.steps
    assert stage.board.outcome("later") is True
    assert stage.submit(stage.prompt("ok"), request_id="later").wait().text == "ok"


def test_g4_200_callers_that_go_away_leave_nothing_behind(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.001)
    refused = 0
    for _ in range(25):
        callers = [stage.submit(stage.prompt("x" * 90), stream=True) for _ in range(8)]
        for caller in callers:
            caller.gone = True
        for caller in callers:
            refused += caller.wait().finish_reason != "cancelled"
    assert refused < 100
    assert stage.submit(stage.prompt("ok")).wait().text == "ok"
    wait_for(lambda: not stage.decoder.rows and not stage.step._watched)


def test_g5_an_empty_generation_is_an_empty_text_with_the_final_flag(stage: Stage, stream: bool) -> None:
    caller = stage.submit(stage.prompt(""), stream=stream)
    final = caller.wait()
    assert (final.text, final.finish_reason, final.completion_tokens) == ("", "stop", 1)
    assert len(caller.answers) == 1


@pytest.mark.parametrize("fails_after", [0, 3])
def test_g5_a_model_that_fails_gives_one_error(
    stage: Stage, stream: bool, fails_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    good_script = stage.decoder.script

    def script(ids: list[int]) -> int:
        if ids[0] == 0 and len(ids) == 2 + fails_after:
            raise RuntimeError("the device is lost")
        return int(good_script(ids))

    stage.decoder.script = script
    caller = stage.submit(stage.prompt("abcdef"), stream=stream)
    with pytest.raises(KimiError, match="RuntimeError"):
        caller.wait()
    assert caller.text == ("abc"[:fails_after] if stream else "")
    assert stage.submit(stage.prompt("ok")).wait().text == "ok"
    assert "the device is lost" in caplog.text


def test_g5_a_detokeniser_that_fails_gives_one_error(
    stage: Stage, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, works = stage.bytes("!")[0], stage.tokenizer.decode_bytes

    def decode_bytes(ids: list[int]) -> bytes:
        if broken in ids:
            raise ValueError("no such token")
        return works(ids)

    monkeypatch.setattr(stage.tokenizer, "decode_bytes", decode_bytes)
    other = stage.submit(stage.prompt("fine"), stream=stream)
    caller = stage.submit(stage.prompt("abc!def"), stream=stream)
    with pytest.raises(KimiError, match="ValueError"):
        caller.wait()
    assert other.wait().finish_reason == "stop"
    assert other.text == "fine"
    assert "no such token" in caplog.text


class BrokenCaller(RecordingCaller):
    """The connection is gone: responding raises, from a number of responses on."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good
        self.calls = 0

    def respond(self, answer: Answer, final: bool) -> None:
        self.calls += 1
        if self.calls > self.good:
            raise ConnectionError("nobody there")
        super().respond(answer, final)


def test_g5_a_caller_that_cannot_be_reached_frees_its_place(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.01)
    caller = BrokenCaller(good=3)
    stage.submit(stage.prompt("x" * 90), caller, stream=True)
    with pytest.raises(KimiError, match="ConnectionError"):
        caller.wait()
    wait_for(lambda: not stage.decoder.rows)
    assert stage.submit(stage.prompt("ok")).wait().text == "ok"


def test_g5_a_final_response_that_fails_is_not_tried_again(stage: Stage) -> None:
    caller = BrokenCaller(good=0)
    stage.submit(stage.prompt("ok"), caller)
    wait_for(lambda: caller.calls == 1 and not stage.decoder.rows)
    time.sleep(0.05)
    assert caller.calls == 1
    assert caller.error is None


def test_g5_a_caller_that_cannot_be_asked_is_taken_for_gone(
    stages: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    class Unaskable(RecordingCaller):
        def is_cancelled(self) -> bool:
            raise ConnectionError("nobody there")

    stage = stages(step_s=0.01)
    caller = Unaskable()
    stage.submit(stage.prompt("x" * 90), caller, stream=True)
    assert caller.wait().finish_reason == "cancelled"
    assert "cannot be asked" in caplog.text


def test_g9_more_requests_than_places_are_refused_at_once(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.01)
    callers = [stage.submit(stage.prompt("x" * 50)) for _ in range(16)]
    with pytest.raises(Unavailable, match="16 requests are running or waiting"):
        stage.submit(stage.prompt("ok")).wait()
    assert all(caller.wait().text == "x" * 50 for caller in callers)


def test_g9_a_time_limit_ends_an_answer(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.05)
    caller = stage.submit(stage.prompt("x" * 90), timeout_s=1.5)
    final = caller.wait()
    assert final.finish_reason == "deadline"
    assert final.text == "x" * final.completion_tokens
    assert 0 < final.completion_tokens < 60


def test_a_live_id_is_refused_and_the_first_request_goes_on(stages: Callable[..., Stage]) -> None:
    stage = stages(step_s=0.01)
    first = stage.submit(stage.prompt("first"), request_id="same")
    with pytest.raises(InvalidRequest, match="'same'"):
        stage.submit(stage.prompt("second"), request_id="same").wait()
    assert first.wait().text == "first"


def test_requests_without_an_id_get_their_own(stage: Stage) -> None:
    ids = {stage.step.submit(llm_request(stage.prompt("ok"), NO_ROWS), RecordingCaller()) for _ in range(5)}
    assert len(ids) == 5
    assert "" not in ids


def test_stopping_answers_everyone(stages: Callable[..., Stage], stream: bool) -> None:
    stage = stages(step_s=0.01)
    caller = stage.submit(stage.prompt("x" * 90), stream=stream)
    stage.step.stop()
    with pytest.raises(Unavailable):
        caller.wait()
    with pytest.raises(Unavailable):
        stage.submit(stage.prompt("ok")).wait()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
