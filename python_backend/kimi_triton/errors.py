# SPDX-License-Identifier: Apache-2.0
"""Every error of kimi-triton, one class per thing a caller can do about it.

KimiError                 INTERNAL       a defect of ours
├── ConfigError           INTERNAL       a checkpoint, option or environment we cannot serve; raised before serving
├── InvalidRequest        INVALID_ARG    the caller must change the request
├── Unavailable           UNAVAILABLE    busy, restarting or dead for now; the caller may try again
└── Cancelled             CANCELLED      the caller went away or asked us to stop

`code` is the name of the member of Triton's error codes; `triton_io` maps it in one place.
"""


class KimiError(Exception):
    """Base class; on its own it means a defect of ours."""

    code = "INTERNAL"


class ConfigError(KimiError):
    """A checkpoint, an option or a machine that cannot be served; the message says what to change."""


class InvalidRequest(KimiError):
    """The request is wrong; the message names the image, option or count."""

    code = "INVALID_ARG"


class Unavailable(KimiError):
    """The work could not be done now; the same request may succeed later."""

    code = "UNAVAILABLE"


class Cancelled(KimiError):
    """The caller no longer wants the answer."""

    code = "CANCELLED"
