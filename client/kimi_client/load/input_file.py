# SPDX-License-Identifier: Apache-2.0
"""Requests as perf_analyzer reads them from a JSON file.

A BYTES tensor given as base64 must hold each element after its own length (4 bytes little-endian), and needs its shape
because the model's is variable; else the server complains of incomplete string data. A request without pictures has no
`image` at all, which the models allow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_client.load.mix import DrawnRequest
from kimi_client.tensors import pack_bytes


def write_input_file(path: Path, requests: Sequence[DrawnRequest], *, stream: bool, max_tokens: int) -> None:
    """Write requests for `--input-data`; perf_analyzer sends them in turn, from the start again after the last."""
    options = json.dumps({"stream": stream, "max_tokens": max_tokens})
    path.write_text(json.dumps({"data": [_entry(request, options) for request in requests]}))


def _entry(request: DrawnRequest, options: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"text_input": [request.prompt], "sampling_parameters": [options]}
    if request.images:
        packed = base64.b64encode(pack_bytes(request.images)).decode()
        entry["image"] = {"content": {"b64": packed}, "shape": [len(request.images)]}
    return entry
