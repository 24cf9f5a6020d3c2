# SPDX-License-Identifier: Apache-2.0
"""Every error of kimi-triton, one class per thing a caller can do about it.

KimiError                 INTERNAL       a defect of ours
├── ConfigError           INTERNAL       a checkpoint, option or environment we cannot serve; raised before serving
├── InvalidRequest        INVALID_ARG    the caller must change the request
├── Unavailable           UNAVAILABLE    busy, restarting or dead for now; the caller may try again
└── Cancelled             CANCELLED      the caller went away or asked us to stop

`code` is the name of the member of Triton's error codes; `triton_io` maps it in one place. A gRPC stream and HTTP
`generate` carry the message alone, so the message itself starts with the kind of every error that is not the caller's.
"""

from __future__ import annotations

import re


class KimiError(Exception):
    """Base class; on its own it means a defect of ours."""

    code = "INTERNAL"
    kind = "internal error: "


class ConfigError(KimiError):
    """A checkpoint, an option or a machine that cannot be served; the message says what to change."""


class InvalidRequest(KimiError):
    """The request is wrong; the message names the image, option or count."""

    code = "INVALID_ARG"
    kind = ""


class Unavailable(KimiError):
    """The work could not be done now; the same request may succeed later."""

    code = "UNAVAILABLE"
    kind = "unavailable, try again: "


class Cancelled(KimiError):
    """The caller no longer wants the answer."""

    code = "CANCELLED"
    kind = "cancelled: "


def error_text(error: KimiError) -> str:
    """The message as callers get it, which tells the kind of error without its code."""
    return f"{error.kind}{error}"


def error_from_text(text: str) -> KimiError:
    """The error that `error_text` wrote, or Triton's own, whatever an ensemble put in front of it."""
    message = _ENSEMBLE_PREFIX.sub("", text)
    for error_class in (KimiError, Unavailable, Cancelled):
        if message.startswith(error_class.kind):
            return error_class(message.removeprefix(error_class.kind))
    if any(words in message for words in _TRITON_UNAVAILABLE):
        return Unavailable(message)
    if message.startswith(_TRITON_INTERNAL):
        return KimiError(message)
    return InvalidRequest(message)


_ENSEMBLE_PREFIX = re.compile(r"^in ensemble '[^']*', ")
_TRITON_UNAVAILABLE = ("maximum queue size", "is not ready", "not at ready state", "Stub process")
_TRITON_INTERNAL = ("Failed to process the request", "Request for unknown model", "in ensemble")
