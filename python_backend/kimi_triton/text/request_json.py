# SPDX-License-Identifier: Apache-2.0
"""JSON that a caller wrote."""

from __future__ import annotations

import json
from typing import Any

from kimi_triton.errors import InvalidRequest


def parse_json(raw: bytes, what: str, max_bytes: int) -> Any:
    """The value of `raw`, or InvalidRequest that starts with `what`: too large, no UTF-8, no JSON, nested too deep."""
    if len(raw) > max_bytes:
        raise InvalidRequest(f"{what} has {len(raw)} bytes, the limit is {max_bytes}")
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise InvalidRequest(f"{what} nests JSON too deep") from None
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"{what} is no UTF-8: byte {exc.start} is 0x{raw[exc.start]:02x}") from None
    except json.JSONDecodeError as exc:
        raise InvalidRequest(f"{what} is no JSON: {exc.msg} at character {exc.pos}") from None
    except ValueError as exc:  # an integer of thousands of digits
        raise InvalidRequest(f"{what} is no usable JSON: {exc}") from None
