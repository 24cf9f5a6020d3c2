# SPDX-License-Identifier: Apache-2.0
"""What the engine does when vLLM servers fail, disappear, come back, or say strange things."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch

from kimi_triton.errors import ConfigError, InvalidRequest, KimiError, Unavailable
from kimi_triton.llm.engine import Token
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.llm.vllm_body import RequestBody
from kimi_triton.llm.vllm_engine import VllmEngine
from kimi_triton.llm.vllm_events import Piece, VllmFailed, parse_piece, read_pieces
from kimi_triton.llm.vllm_servers import VllmSettings
from kimi_triton.llm.vllm_urls import parse_urls
from tests.llm.fake_vllm import FakeVllm, Fault, rows_of
from tests.llm.scripted import RecordingSink, greedy, token_request

EOS, MEDIA, BLOCKED = 501, 503, 504
ROLES = TokenRoles(
    stop=frozenset((EOS,)), think_start=None, think_end=None, shown=frozenset(), blocked=frozenset((MEDIA, BLOCKED))
)


def counting(ids: list[int]) -> int:
    return (ids[0] + len(ids)) % 500


def expected(first: int, num_prompt: int, num_tokens: int) -> list[int]:
    return [(first + num_prompt + done) % 500 for done in range(num_tokens)]


class Cluster:
    """Servers and engines that are stopped at the end."""

    def __init__(self) -> None:
        self.servers: list[FakeVllm] = []
        self.engines: list[VllmEngine] = []

    def server(self, script: Callable[[list[int]], int | torch.Tensor] = counting, **settings: float) -> FakeVllm:
        self.servers.append(FakeVllm(script, **settings).start())  # type: ignore[arg-type]
        return self.servers[-1]

    def engine(self, *urls: str, **settings: float) -> VllmEngine:
        chosen = {"retry_after_s": 0.01, "look_every_s": 0.02, "connect_timeout_s": 1.0} | settings
        engine = VllmEngine(
            urls or tuple(server.url for server in self.servers),
            body=RequestBody(rows_of, ROLES, MEDIA),
            stop_ids=ROLES.stop,
            context_length=4096,
            settings=VllmSettings(**chosen),  # type: ignore[arg-type]
        )
        engine.start()
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in self.engines:
            engine.stop()
        for server in self.servers:
            server.stop()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def submit(engine: VllmEngine, ids: list[int], request_id: str = "r", **changes: object) -> RecordingSink:
    sink = RecordingSink()
    engine.submit(token_request(ids, request_id, **changes), sink)
    return sink


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("per_event", [1, 3])
def test_64_mixed_requests_get_their_own_answers(cluster: Cluster, per_event: int) -> None:
    cluster.server(per_event=per_event)
    engine = cluster.engine()
    sinks = [
        submit(engine, [index * 7, *range(index % 9)], str(index), max_tokens=1 + index % 13) for index in range(64)
    ]
    for index, sink in enumerate(sinks):
        assert sink.wait() == "length"
        assert sink.ids == expected(index * 7, 1 + index % 9, 1 + index % 13)


@pytest.mark.parametrize("ends_with_stop_token", [True, False])
def test_h1_a_stop_token_is_delivered_whether_vllm_sends_it_or_not(
    cluster: Cluster, ends_with_stop_token: bool
) -> None:
    cluster.server(lambda ids: EOS if len(ids) == 4 else 7).ends_with_stop_token = ends_with_stop_token
    sink = submit(cluster.engine(), [1], max_tokens=50)
    assert sink.wait() == "stop"
    assert sink.ids == [7, 7, 7, EOS]


def test_options_reach_vllm_and_blocked_tokens_are_biased_away(cluster: Cluster) -> None:
    server = cluster.server(lambda _: torch.eye(600)[MEDIA] * 50 + torch.eye(600)[BLOCKED] * 40 + torch.eye(600)[9])
    engine = cluster.engine()
    options = greedy(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.2, seed=2**63 - 1, logprobs=True
    )
    sink = submit(engine, [1], options=options, max_tokens=3)
    assert sink.wait() == "length"
    assert sink.ids == [9, 9, 9]
    assert all(token.logprob is not None for token in sink.tokens)
    sent = server.bodies[0]
    stated = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2, "max_tokens": 3}
    assert {name: sent[name] for name in stated} == stated
    assert (sent["seed"], sent["logprobs"], sent["stop_token_ids"]) == (2**63 - 1, 0, [EOS])
    submit(engine, [1], max_tokens=1).wait()
    assert not {"seed", "logprobs"} & server.bodies[1].keys()
    assert server.bodies[1]["temperature"] == 0


def test_image_rows_take_the_places_of_the_placeholders(cluster: Cluster) -> None:
    seen: list[list[int]] = []
    cluster.server(lambda ids: seen.append(list(ids)) or 7)
    rows = torch.tensor([[250.0], [12.0]])
    submit(cluster.engine(), [1, MEDIA, 2, MEDIA], image_embeds=rows.bfloat16(), max_tokens=1).wait()
    assert seen == [[1, 250, 2, 12]]


def test_the_shorter_context_of_a_server_counts(cluster: Cluster) -> None:
    cluster.server(context=100)
    assert cluster.engine().context_length == 100


def test_requests_go_to_the_least_loaded_server(cluster: Cluster) -> None:
    servers = [cluster.server(step_s=0.01) for _ in range(3)]
    engine = cluster.engine()
    sinks = [submit(engine, [1], str(index), max_tokens=30) for index in range(9)]
    until(lambda: sum(len(server.rows) for server in servers) == 9)
    assert [len(server.rows) for server in servers] == [3, 3, 3]
    for sink in sinks:
        assert sink.wait() == "length"


ERROR_EVENT = '{"error": {"message": "out of memory"}}'


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=503), Fault(), Fault(event=ERROR_EVENT)])
def test_a_failure_before_the_first_token_is_tried_elsewhere(cluster: Cluster, fault: Fault) -> None:
    bad, good = cluster.server(), cluster.server()
    engine = cluster.engine()
    bad.faults.append(fault)
    sink = submit(engine, [1], max_tokens=5)
    assert sink.wait() == "length"
    assert sink.ids == expected(1, 1, 5)
    assert (len(bad.bodies), len(good.bodies)) == (1, 1)


def test_a_single_server_is_asked_again_and_not_for_ever(cluster: Cluster) -> None:
    server = cluster.server()
    engine = cluster.engine(attempts=3)
    server.faults.extend([Fault(status=503)] * 2)
    assert submit(engine, [1]).wait() == "length"
    server.faults.extend([Fault(status=503)] * 5)
    error = submit(engine, [1]).wait()
    assert isinstance(error, Unavailable)
    assert str(error).count("HTTP 503") == 3
    assert len(server.bodies) == 6


@pytest.mark.parametrize("fault", [Fault(after=3), Fault(after=3, event=ERROR_EVENT)])
def test_g5_a_failure_after_tokens_is_an_error_that_is_not_retried(cluster: Cluster, fault: Fault) -> None:
    first, second = cluster.server(), cluster.server()
    engine = cluster.engine()
    first.faults.append(fault)
    sink = submit(engine, [1], max_tokens=20)
    error = sink.wait()
    assert isinstance(error, Unavailable)
    assert "failed after 3 tokens" in str(error)
    assert sink.ids == expected(1, 1, 3)
    assert not second.bodies


@pytest.mark.parametrize("after", [0, 2])
def test_silence_is_taken_for_death(cluster: Cluster, after: int) -> None:
    cluster.server().faults.extend([Fault(after=after, hangs=True)] * 2)
    engine = cluster.engine(stall_timeout_s=0.2, attempts=2)
    start = time.monotonic()
    error = submit(engine, [1], max_tokens=20).wait()
    assert isinstance(error, Unavailable)
    assert time.monotonic() - start < 10


def test_a_refusal_is_our_defect_and_is_not_retried(cluster: Cluster) -> None:
    server = cluster.server()
    engine = cluster.engine()
    server.faults.append(Fault(status=400))
    error = submit(engine, [1]).wait()
    assert type(error) is KimiError
    assert "HTTP 400" in str(error)
    assert "by order of the test" in str(error)
    assert len(server.bodies) == 1


def test_a_server_that_is_killed_and_started_again_answers_the_next_request(cluster: Cluster) -> None:
    server = cluster.server(step_s=0.01)
    engine = cluster.engine()
    sink = submit(engine, [1], max_tokens=2000)
    until(lambda: len(sink.tokens) > 5)
    server.stop()
    error = sink.wait()
    assert isinstance(error, Unavailable)
    assert f"vLLM at {server.url} failed after" in str(error)
    until(lambda: not engine.is_healthy())
    refused = submit(engine, [1]).wait()
    assert isinstance(refused, Unavailable)
    assert "no vLLM server could answer" in str(refused)
    server.start()
    assert submit(engine, [1], max_tokens=3).wait() == "length"
    until(engine.is_healthy)


def test_start_waits_for_the_first_server(cluster: Cluster) -> None:
    server = cluster.server()
    missing = f"http://127.0.0.1:{free_port()}"
    engine = cluster.engine(missing, server.url)
    assert engine.is_healthy()
    assert submit(engine, [1]).wait() == "length"
    with pytest.raises(ConfigError, match=r"no vLLM server was ready within 0 s at .*llm-command"):
        cluster.engine(missing, start_timeout_s=0.1)


def test_g4_cancelling_closes_the_connection_and_stops_the_server(cluster: Cluster) -> None:
    server = cluster.server(step_s=0.01)
    engine = cluster.engine()
    sink = submit(engine, [1], max_tokens=2000)
    until(lambda: len(sink.tokens) >= 5)
    seen = len(sink.tokens)
    assert engine.cancel("r")
    assert sink.wait() == "cancelled"
    assert len(sink.tokens) <= seen + 3
    until(lambda: not server.rows)
    assert not engine.cancel("r")


def test_g4_cancelling_at_once_ends_every_request_exactly_once(cluster: Cluster) -> None:
    server = cluster.server(step_s=0.001)
    engine = cluster.engine()
    sinks = []
    for index in range(200):
        sinks.append(submit(engine, [1], str(index), max_tokens=2000))
        engine.cancel(str(index))
    assert {sink.wait() for sink in sinks} == {"cancelled"}
    until(lambda: not server.rows)
    assert submit(engine, [1], "0").wait() == "length"


def test_a_sink_that_has_enough_stops_the_server(cluster: Cluster) -> None:
    server = cluster.server(step_s=0.005)
    engine = cluster.engine()
    sink = RecordingSink(wanted=3)
    engine.submit(token_request([1], max_tokens=2000), sink)
    until(lambda: len(sink.tokens) == 3)
    until(lambda: not server.rows)
    assert not sink.ends
    assert not engine.cancel("r")


def test_an_id_that_is_live_is_refused(cluster: Cluster) -> None:
    cluster.server(step_s=0.01)
    engine = cluster.engine()
    first = submit(engine, [1], "same", max_tokens=20)
    with pytest.raises(InvalidRequest, match="request id 'same'"):
        submit(engine, [2], "same")
    assert first.wait() == "length"
    assert submit(engine, [2], "same").wait() == "length"


def test_a_deadline_ends_an_answer_and_refuses_one_that_has_not_begun(cluster: Cluster) -> None:
    server = cluster.server(step_s=0.01)
    engine = cluster.engine()
    deadline = time.monotonic() + 1.5
    running = submit(engine, [1], "running", max_tokens=4000, deadline=deadline)
    until(lambda: running.tokens)
    server.faults.append(Fault(hangs=True))
    waiting = submit(engine, [2], "waiting", max_tokens=4000, deadline=deadline)
    assert running.wait() == "deadline"
    assert isinstance(waiting.wait(), Unavailable)
    assert time.monotonic() < deadline + 5
    until(lambda: not server.rows)


def test_stopping_tells_every_request(cluster: Cluster) -> None:
    cluster.server(step_s=0.01)
    engine = cluster.engine()
    sinks = [submit(engine, [1], str(index), max_tokens=4000) for index in range(5)]
    engine.stop()
    assert all(isinstance(sink.wait(), Unavailable) for sink in sinks)
    assert not engine.is_healthy()
    with pytest.raises(Unavailable):
        submit(engine, [1], "after")


def test_more_than_the_limit_is_unavailable(cluster: Cluster) -> None:
    cluster.server(step_s=0.01)
    engine = cluster.engine(max_live=2)
    sinks = [submit(engine, [1], str(index), max_tokens=10) for index in range(2)]
    with pytest.raises(Unavailable, match="2 requests are running or waiting"):
        submit(engine, [1], "more")
    for sink in sinks:
        assert sink.wait() == "length"


def pieces(*chunks: bytes) -> list[Piece]:
    async def cut() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    found: list[Piece] = []

    async def collect() -> None:
        async for piece in read_pieces(cut(), frozenset((EOS,))):
            found.append(piece)

    with pytest.raises(VllmFailed, match="broke off"):
        asyncio.run(collect())
    return found


def test_events_are_read_however_the_bytes_are_cut() -> None:
    stream = (
        b'data: {"choices": [{"token_ids": [1, 2]}]}\r\n\r\n: keep-alive\n\ndata: {"choices": [{"token_ids": [3]}]}\n\n'
    )
    stream += b"data: [DONE]\n\n"
    whole = pieces(stream)
    assert [token.token_id for piece in whole for token in piece.tokens] == [1, 2, 3]
    cut = pieces(*(stream[place : place + 1] for place in range(len(stream))))
    assert [piece.tokens for piece in cut] == [[Token(1), Token(2)], [Token(3)]]


def test_what_came_together_is_one_piece_and_is_kept_when_an_error_follows() -> None:
    events = b'data: {"choices": [{"token_ids": [1]}]}\n\ndata: {"choices": [{"token_ids": [2]}]}\n\n'
    together = [Token(1), Token(2)]
    assert [piece.tokens for piece in pieces(events)] == [together]
    failed = pieces(events + b'data: {"error": {"message": "broke off at last"}}\n\n')
    assert [piece.tokens for piece in failed] == [together]


class Grouping(RecordingSink):
    """Notes how many tokens came together."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[int] = []
        self.began_at = 0.0
        self._open = 0

    def on_token(self, token: Token, more: bool = False) -> bool:
        self.began_at = self.began_at or time.monotonic()
        self._open += 1
        if not more:
            self.groups.append(self._open)
            self._open = 0
        return super().on_token(token, more)


def test_fast_tokens_are_handed_on_together_and_the_first_at_once(cluster: Cluster) -> None:
    cluster.server(step_s=0.001)
    sink = Grouping()
    cluster.engine(read_every_s=0.1).submit(token_request([1], max_tokens=300), sink)
    assert sink.wait() == "length"
    seconds = time.monotonic() - sink.began_at
    assert sink.ids == expected(1, 1, 300)
    assert sum(sink.groups) == 300
    assert sink.groups[0] < 50
    assert len(sink.groups) <= seconds / 0.1 + 3


def test_slow_tokens_are_handed_on_one_by_one(cluster: Cluster) -> None:
    cluster.server(step_s=0.1)
    sink = Grouping()
    cluster.engine(read_every_s=0.02).submit(token_request([1], max_tokens=10), sink)
    assert sink.wait() == "length"
    assert sink.groups == [1] * 10


def test_a_server_that_dies_while_nothing_is_read_is_named(cluster: Cluster) -> None:
    server = cluster.server(step_s=0.001)
    sink = submit(cluster.engine(read_every_s=0.5), [1], max_tokens=4000)
    until(lambda: sink.tokens)
    server.stop()
    error = sink.wait()
    assert isinstance(error, Unavailable)
    assert "failed after" in str(error)
    server.start()


def test_g4_an_answer_that_is_not_being_read_is_cancelled_at_once(cluster: Cluster) -> None:
    server = cluster.server(step_s=0.001)
    engine = cluster.engine(read_every_s=30.0)
    sink = submit(engine, [1], max_tokens=4000)
    until(lambda: sink.tokens)
    start = time.monotonic()
    assert engine.cancel("r")
    assert sink.wait() == "cancelled"
    until(lambda: not server.rows)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]", b'"text"', b'{"choices": [{"token_ids": ["a"]}]}', b'{"choices": [{"finish_reason": "abort"}]}'],
)
def test_strange_events_are_failures_of_the_server(data: bytes) -> None:
    with pytest.raises(VllmFailed):
        parse_piece(data, frozenset())


def test_tokens_behind_a_stop_token_are_dropped() -> None:
    piece = parse_piece(b'{"choices": [{"token_ids": [1, 501, 2]}]}', frozenset((EOS,)))
    assert [token.token_id for token in piece.tokens] == [1, EOS]
    assert piece.tokens[-1].finish_reason == "stop"


def test_addresses_are_checked() -> None:
    assert parse_urls("http://a:1/, https://b/v1") == ("http://a:1", "https://b")
    for wrong, message in (
        ("", "no vLLM server is given"),
        ("host:8000", "'host:8000' is no URL"),
        ("http://a,http://a/", "twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_urls(wrong)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
