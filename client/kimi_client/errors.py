# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, one class per thing a caller can do about it.

KimiClientError
├── InvalidRequest       change the request: an image, a message or an option is wrong
├── ServerUnavailable    try again: nobody listens there, a model is still loading, or the queue is full
├── ServerError          the server failed or is not a kimi-triton server; its log says why
├── RequestTimeout       no answer within `timeout_s`; the server has been told to stop
└── RequestCancelled     the request was cancelled, here or by somebody who knew its id

`from_status` is the only place where a gRPC or HTTP status becomes one of these.
"""

from __future__ import annotations

import re


class KimiClientError(Exception):
    """Base class of everything this package raises on purpose."""


class InvalidRequest(KimiClientError):
    """The request is wrong; the message names the image (0-based), message or option."""


class ServerUnavailable(KimiClientError):
    """Nothing is wrong with the request; the same call may succeed in a few seconds."""


class ServerError(KimiClientError):
    """The server could not do what it should have done."""


class RequestTimeout(KimiClientError):
    """The answer, or the next piece of a stream, did not come in time."""


class RequestCancelled(KimiClientError):
    """The request was stopped before it was answered."""


_BY_STATUS: dict[str, type[KimiClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "RESOURCE_EXHAUSTED": InvalidRequest,  # gRPC's word for a message above the size limit
    "UNAVAILABLE": ServerUnavailable,
    "DEADLINE_EXCEEDED": RequestTimeout,
    "CANCELLED": RequestCancelled,
    "400": InvalidRequest,
    "413": InvalidRequest,
    "408": RequestTimeout,
    "429": ServerUnavailable,
    "499": RequestCancelled,
    "502": ServerUnavailable,
    "503": ServerUnavailable,
    "504": RequestTimeout,
}

_ENSEMBLE_PREFIX = re.compile(r"^in ensemble '[^']*', ")

# A gRPC stream and HTTP `generate` give no status of their own (`generate` says 400 or even 200 to every failure), so
# kimi-triton starts its messages with the kind of error. What starts with none of these is the caller's mistake.
_BY_KIND: dict[str, type[KimiClientError]] = {
    "internal error: ": ServerError,
    "unavailable, try again: ": ServerUnavailable,
    "cancelled: ": RequestCancelled,
}
_TRITON_UNAVAILABLE = ("maximum queue size", "is not ready", "not at ready state", "Stub process")
_TRITON_INTERNAL = ("Failed to process the request", "Request for unknown model", "in ensemble", "generate expects")


def from_status(status: str, message: str) -> KimiClientError:
    """Return the error for a status: a gRPC code name, an HTTP number, or "" where only a message is known."""
    text = _ENSEMBLE_PREFIX.sub("", message.strip()) or "the server gave no reason"
    for kind, error_class in _BY_KIND.items():
        if text.startswith(kind):
            return error_class(text if kind == "unavailable, try again: " else text.removeprefix(kind))
    if status in ("", "200", "400"):
        return _triton_error(text)
    error_class = _BY_STATUS.get(status, ServerError)
    return error_class(f"{text} (try again later)" if error_class is ServerUnavailable else text)


def _triton_error(text: str) -> KimiClientError:
    if any(words in text for words in _TRITON_UNAVAILABLE):
        return ServerUnavailable(f"{text} (try again later)")
    return ServerError(text) if text.startswith(_TRITON_INTERNAL) else InvalidRequest(text)
