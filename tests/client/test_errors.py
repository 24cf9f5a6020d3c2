# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kimi_client import (
    InvalidRequest,
    KimiClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)
from kimi_client.errors import from_status
from kimi_triton import errors as server_errors


@pytest.mark.parametrize(
    ("grpc", "http", "expected"),
    [
        ("INVALID_ARGUMENT", "400", InvalidRequest),
        ("UNAVAILABLE", "503", ServerUnavailable),
        ("CANCELLED", "499", RequestCancelled),
        ("DEADLINE_EXCEEDED", "504", RequestTimeout),
        ("INTERNAL", "500", ServerError),
        ("UNIMPLEMENTED", "501", ServerError),
        ("NOT_FOUND", "404", ServerError),
        ("RESOURCE_EXHAUSTED", "413", InvalidRequest),
    ],
)
def test_both_protocols_give_the_same_class(grpc: str, http: str, expected: type[KimiClientError]) -> None:
    assert type(from_status(grpc, "text")) is expected
    assert type(from_status(http, "text")) is expected


@pytest.mark.parametrize(
    ("server_class", "expected"),
    [
        (server_errors.InvalidRequest, InvalidRequest),
        (server_errors.Unavailable, ServerUnavailable),
        (server_errors.Cancelled, RequestCancelled),
        (server_errors.KimiError, ServerError),
    ],
)
@pytest.mark.parametrize("status", ["", "200", "400"])
@pytest.mark.parametrize("prefix", ["", "in ensemble 'kimi_vl', "])
def test_the_servers_errors_keep_their_kind_where_the_status_is_lost(
    server_class: type[server_errors.KimiError], expected: type[KimiClientError], status: str, prefix: str
) -> None:
    error = from_status(status, prefix + server_errors.error_text(server_class("image 1: what happened")))
    assert type(error) is expected
    assert "image 1: what happened" in str(error)
    assert "in ensemble" not in str(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Request for unknown model: 'x' is not found", ServerError),
        ("in ensemble 'kimi_vl', [request id: 1] Exceeds maximum queue size", ServerUnavailable),
        ("Model 'kimi_vl' is not ready", ServerUnavailable),
        ("unexpected inference input 'x' for model 'kimi_vl'", InvalidRequest),
        ("in ensemble 'kimi_vl', Failed to process the request(s) for model instance 'llm_0_0'", ServerError),
    ],
)
def test_tritons_own_messages_on_a_stream(text: str, expected: type[KimiClientError]) -> None:
    assert type(from_status("", text)) is expected


def test_what_may_be_tried_again_says_so() -> None:
    assert "try again" in str(from_status("UNAVAILABLE", "Connection refused"))
    assert str(from_status("", "unavailable, try again: full")).count("try again") == 1


def test_an_empty_message_is_filled() -> None:
    assert str(from_status("INTERNAL", "")) == "the server gave no reason"


def test_every_error_is_a_kimi_client_error() -> None:
    for error in (InvalidRequest, RequestCancelled, RequestTimeout, ServerError, ServerUnavailable):
        assert issubclass(error, KimiClientError)
