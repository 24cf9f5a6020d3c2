# SPDX-License-Identifier: Apache-2.0
"""One tiny real inference for each stage: whether a model answers, not whether Triton calls it ready.

The language model is asked through the whole chain, by text alone. Triton names the process when one is dead, so an
answer of one stage can tell that another is ill. A vLLM server that is down or hangs is ill too, but it is not ours to
start again: its engine answers for it, in time because the request has a time limit.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

STAGES = ("preprocess", "moonvit", "llm", "kimi_vl_unary")
State = Literal["ok", "busy", "loading", "ill"]

CANARY_TIMEOUT_S = 15.0  # for a token; less than a watcher waits for an answer
VLLM = "vLLM"  # the engine's errors name what they are about
BUSY = ("maximum queue size", "unavailable, try again: ")
DEAD_STUB = re.compile(r"Stub process '(\w+?)(?:_\d+)+' is not healthy")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found out about a stage."""

    stage: str
    state: State
    detail: str = ""
    certain: bool = False  # the model's process is dead: no need to look again
    elsewhere: bool = False  # what is ill is none of this server's processes: starting them again would not help


def probe(http_url: str, stage: str, timeout_s: float) -> Finding:
    """Ask `stage` of the server at `http_url` (host:port)."""
    path, body = _request(stage)
    request = urllib.request.Request(f"http://{http_url}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read().decode(errors="replace")
    except urllib.error.HTTPError as exc:
        text = exc.read().decode(errors="replace") or f"HTTP {exc.code}"
    except OSError as exc:
        return Finding(stage, "ill", f"no answer: {exc}")
    return judge(stage, text)


def judge(stage: str, text: str) -> Finding:
    """What an answer's body says; `generate` answers errors with status 200."""
    error = _error(text)
    if error is None:
        return Finding(stage, "ok")
    if match := DEAD_STUB.search(error):
        return Finding(match[1], "ill", error, certain=True)
    if VLLM in error:
        return Finding(stage, "ill", error, elsewhere=True)
    if any(words in error for words in BUSY):
        return Finding(stage, "busy", error)
    return Finding(stage, "ill", error)


def _error(text: str) -> str | None:
    try:
        answer = json.loads(text)
    except ValueError:
        return text[:500]
    error = answer.get("error") if isinstance(answer, dict) else text[:500]
    return None if error is None else str(error)


def _request(stage: str) -> tuple[str, dict[str, Any]]:
    if stage == "preprocess":
        inputs = [_tensor("text_input", "BYTES", [1], ["ping"]), _tensor("image", "BYTES", [1], [_picture()])]
        return "/v2/models/preprocess/infer", {"inputs": inputs, "outputs": [{"name": "image_grid_thw"}]}
    if stage == "moonvit":
        inputs = [
            _tensor("pixel_values", "UINT8", [1, 4, 3, 14, 14], [0] * (4 * 3 * 14 * 14)),
            _tensor("image_grid_thw", "INT64", [1, 1, 3], [1, 2, 2]),
            _tensor("image_digest", "UINT8", [1, 1, 32], list(os.urandom(32))),  # new, or the cache would answer
        ]
        return "/v2/models/moonvit/infer", {"inputs": inputs, "outputs": [{"name": "image_cached"}]}
    model = "kimi_vl" if stage == "llm" else stage
    body = {"text_input": "ping", "max_tokens": 1, "temperature": 0, "timeout": int(1e6 * CANARY_TIMEOUT_S)}
    return f"/v2/models/{model}/generate", body


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (28, 28)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
