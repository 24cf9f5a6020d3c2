# SPDX-License-Identifier: Apache-2.0
"""Ports are free when they are chosen; when one is taken before the server has it, others are chosen."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kimi_triton.errors import ConfigError
from kimi_triton.serve.launch import PORT_ATTEMPTS, _retried
from kimi_triton.serve.ports import Ports, PortTaken

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_three_different_free_ports_are_chosen() -> None:
    ports = Ports.choose(HOST, 0, 0, 0)
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    ports.check_free(HOST)


def test_a_named_port_that_is_taken_is_refused_by_the_choice(taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"gRPC port {taken} on 127.0.0.1") as caught:
        Ports.choose(HOST, 0, taken, 0)
    assert not isinstance(caught.value, PortTaken)


def test_a_port_taken_after_the_choice_is_named(taken: int) -> None:
    ports = Ports.choose(HOST, 0, 0, 0)
    with pytest.raises(PortTaken, match=rf"metrics port {taken}"):
        Ports(ports.http, ports.grpc, taken).check_free(HOST)


def test_the_start_is_tried_again_only_for_ports_that_were_taken() -> None:
    outcomes: list[Any] = [PortTaken("taken"), PortTaken("taken"), "server"]
    assert _retried(lambda: _next(outcomes)) == "server"  # type: ignore[arg-type, return-value]
    outcomes = [PortTaken("taken")] * (PORT_ATTEMPTS + 1)
    with pytest.raises(PortTaken):
        _retried(lambda: _next(outcomes))  # type: ignore[arg-type, return-value]
    assert len(outcomes) == 1
    outcomes = [ConfigError("a model did not load"), "server"]
    with pytest.raises(ConfigError, match="a model did not load"):
        _retried(lambda: _next(outcomes))  # type: ignore[arg-type, return-value]


def _next(outcomes: list[Any]) -> Any:
    outcome = outcomes.pop(0)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
