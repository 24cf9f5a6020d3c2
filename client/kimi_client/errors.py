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

# Triton's `/generate` answers 400 to every failure and a running stream carries only text, so there the class
# has to be read from the message. These are the words of Triton and of kimi-triton for "not now".
_TRY_AGAIN = ("try again", "is not ready", "not at ready state", "maximum queue size", "unavailable")
_ASKED_WRONGLY = ("unexpected inference input", "unable to parse", "failed to parse", "expected")


def from_status(status: str, message: str) -> KimiClientError:
    """Return the error for a status: a gRPC code name, an HTTP number, or "" where only a message is known."""
    text = message.strip() or f"the server answered {status or 'an error'} without a message"
    lowered = text.lower()
    if status in ("", "200", "400") and any(words in lowered for words in _TRY_AGAIN):
        return ServerUnavailable(_with_hint(text))
    if status == "" and any(words in lowered for words in _ASKED_WRONGLY):
        return InvalidRequest(text)
    kind = _BY_STATUS.get(status, ServerError)
    return kind(_with_hint(text) if kind is ServerUnavailable else text)


def _with_hint(text: str) -> str:
    return text if "try again" in text.lower() else f"{text} (try again later)"
