# SPDX-License-Identifier: Apache-2.0
"""What a caller may ask of a generation: one dataclass, read from request parameters and a JSON string."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kimi_triton.config import read_json
from kimi_triton.errors import ConfigError, InvalidRequest
from kimi_triton.text import option_values as values
from kimi_triton.text.option_values import Parser, Range
from kimi_triton.text.request_json import parse_json

MAX_OPTIONS_BYTES = 1 << 20

# Parameters that Triton itself reads, or adds on the way through an ensemble. HTTP `generate` hands on every JSON key
# that is no input, the `id` of the request among them.
TRITON_PARAMETERS = frozenset(
    ("id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
# transformers' name -> ours, for the defaults that a checkpoint brings along.
_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def _option(default: Any, parse: Parser, doc: str, allowed: Range | None = None) -> Any:
    return field(default=default, metadata={"parse": parse, "doc": doc, "allowed": allowed})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Checked options of one request; `metadata` of each field holds its parser, meaning and range."""

    max_tokens: int = _option(1024, values.integer, "longest answer, cut to what the context leaves free", Range(1))
    temperature: float = _option(1.0, values.number, "0 takes the likeliest token each time", Range(0, 2))
    top_p: float = _option(1.0, values.number, "keep the likeliest tokens up to this sum", Range(0, 1, above=True))
    top_k: int = _option(0, values.top_k, "keep this many tokens; 0 or -1 is off", Range(0, 2**31 - 1))
    min_p: float = _option(0.0, values.number, "keep tokens this likely, relative to the likeliest", Range(0, 1))
    repetition_penalty: float = _option(1.0, values.number, "above 1 avoids earlier tokens", Range(0, 2, above=True))
    seed: int | None = _option(None, values.integer, "makes sampling repeatable", Range(0, 2**63 - 1))
    stop: tuple[str, ...] = _option((), values.stop_strings, "the answer ends before any of these strings")
    stream: bool = _option(False, values.boolean, "one response per piece of text instead of one for all")
    thinking: bool | None = _option(None, values.boolean, "Kimi-K2.5: think before answering; on unless set to false")
    logprobs: bool = _option(False, values.boolean, "report the log-probability of each token")

    def __post_init__(self) -> None:
        for option in fields(self):
            value, allowed = getattr(self, option.name), option.metadata["allowed"]
            if allowed is not None and value is not None and value not in allowed:
                raise InvalidRequest(f"option {option.name} must be {allowed}, got {str(value)[:80]}")

    @classmethod
    def from_request(
        cls,
        parameters: Mapping[str, str | int | bool | float],
        sampling_parameters: bytes | None = None,
        defaults: GenerationOptions | None = None,
    ) -> GenerationOptions:
        """Options of a request over `defaults`.

        `parameters` are Triton's request parameters, `sampling_parameters` is a JSON object. Raises InvalidRequest for
        an unknown name, a wrong value, or one option that is given twice with different values.
        """
        ours = {name: value for name, value in parameters.items() if not _is_tritons(name)}
        if "stop" in ours:
            ours["stop"] = values.stop_parameter(ours["stop"])
        chosen = _parse(ours, "request parameter")
        for name, value in _parse_json(sampling_parameters or b"{}", "sampling_parameters").items():
            if chosen.setdefault(name, value) != value:
                raise InvalidRequest(
                    f"option {name} is {chosen[name]!r} as request parameter but {value!r} in sampling_parameters"
                )
        return replace(defaults or cls(), **chosen)

    @classmethod
    def from_checkpoint(cls, folder: Path) -> GenerationOptions:
        """Defaults of a checkpoint: generation_config.json where it has a say, ours for the rest."""
        if not (folder / "generation_config.json").is_file():
            return cls()
        stated = read_json(folder / "generation_config.json")
        found = {ours: stated[theirs] for theirs, ours in _GENERATION_CONFIG.items() if stated.get(theirs) is not None}
        if stated.get("do_sample") is False:
            found["temperature"] = 0
        try:
            return cls(**_parse(found, "option"))
        except InvalidRequest as exc:
            raise ConfigError(f"{folder / 'generation_config.json'}: {exc}") from None

    def to_json(self) -> bytes:
        """The `generation` tensor between two steps."""
        stated = {option.name: getattr(self, option.name) for option in fields(self)}
        return json.dumps({name: value for name, value in stated.items() if value is not None}).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> GenerationOptions:
        """Inverse of `to_json`. It checks like `from_request`, because `llm` can also be called directly."""
        return cls(**_parse_json(raw, "generation"))


def _parse(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    known = {option.name: option.metadata["parse"] for option in fields(GenerationOptions)}
    for name in given:
        if name not in known:
            raise InvalidRequest(f"unknown {kind} {name[:80]!r}; known are {', '.join(known)}")
    return {name: known[name](name, value) for name, value in given.items()}


def _parse_json(raw: bytes, what: str) -> dict[str, Any]:
    value = parse_json(raw, what, MAX_OPTIONS_BYTES)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be a JSON object, got a JSON {type(value).__name__}")
    return _parse(value, f"key of {what}")


def _is_tritons(name: str) -> bool:
    return name in TRITON_PARAMETERS or name.startswith("triton_")
