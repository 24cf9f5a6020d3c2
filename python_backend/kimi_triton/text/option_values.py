# SPDX-License-Identifier: Apache-2.0
"""From the value a caller wrote to the value of an option: types here, and the range an option allows.

Request parameters can only be integers, booleans and strings (doubles on newer servers), so numbers and booleans are
also read from strings. Nothing else is converted: no boolean is a number, no 5.0 is an integer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kimi_triton.errors import InvalidRequest

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256

Parser = Callable[[str, Any], Any]  # (option name, value as written) -> value


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; `low` itself is left out when `above` is set."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low < value <= self.high if self.above else self.low <= value <= self.high

    def __str__(self) -> str:
        low = f"more than {self.low}" if self.above else f"at least {self.low}"
        return low if self.high == math.inf else f"{low} and at most {self.high}"


def integer(name: str, value: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, value, "an integer")
    return value


def top_k(name: str, value: Any) -> int:
    """An integer, where -1 is vLLM's way to write "off" and 0 is ours."""
    count = integer(name, value)
    return 0 if count == -1 else count


def number(name: str, value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, value, "a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise InvalidRequest(f"option {name} must be a finite number")
    return result


def boolean(name: str, value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise wrong_type(name, value, "true or false")
    return value


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """One string, or a list of up to 16; each 1 to 256 characters long."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise wrong_type(name, value, "a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"option {name} has {len(stops)} strings, the limit is {MAX_STOP_STRINGS}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"option {name}: a string has {len(stop)} characters, allowed are 1 to {MAX_STOP_CHARS}"
            )
    return tuple(stops)


def stop_parameter(value: Any) -> Any:
    """A request parameter cannot be a list: a string that is a JSON list of strings (`[]` is one) stands for it."""
    if not (isinstance(value, str) and value.startswith("[")):
        return value
    try:
        stops = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return stops if all(isinstance(stop, str) for stop in stops) else value


def wrong_type(name: str, value: Any, expected: str) -> InvalidRequest:
    shown = repr(value) if isinstance(value, str | int | float | None) else f"a JSON {type(value).__name__}"
    return InvalidRequest(f"option {name} must be {expected}, got {shown[:80]}")
