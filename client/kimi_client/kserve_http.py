# SPDX-License-Identifier: Apache-2.0
"""HTTP bodies of the KServe protocol with Triton's extensions, both ways, without any connection.

`infer` carries a JSON header and then the tensors as bytes; `generate` is JSON alone: inputs by name, strings for
BYTES; `generate_stream` answers with such JSON in server-sent events.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kimi_client.errors import ServerError, from_status
from kimi_client.request import InferRequest
from kimi_client.shared_memory import Region
from kimi_client.tensors import Outputs, pack_bytes, to_array

HEADER_LENGTH = "Inference-Header-Content-Length"


def infer_body(request: InferRequest, regions: Mapping[str, Region]) -> tuple[bytes, int]:
    """Return the body of an `infer` call and how many of its bytes are the JSON header."""
    inputs, payload = [], []
    for name, elements in request.inputs.items():
        region = regions.get(name)
        if region is None:
            payload.append(pack_bytes(elements))
            where: dict[str, Any] = {"binary_data_size": len(payload[-1])}
        else:
            where = {"shared_memory_region": region.name, "shared_memory_byte_size": region.byte_size}
        inputs.append({"name": name, "datatype": "BYTES", "shape": [len(elements)], "parameters": where})
    header = json.dumps(
        {"id": request.request_id, "inputs": inputs, "parameters": {"binary_data_output": True}}
    ).encode()
    return b"".join([header, *payload]), len(header)


def read_infer(body: bytes, header_length: int) -> Outputs:
    """Read the body of an `infer` response whose tensors all came as bytes."""
    outputs, offset = {}, header_length
    for output in json.loads(body[:header_length])["outputs"]:
        end = offset + output["parameters"]["binary_data_size"]
        outputs[output["name"]] = to_array(output["datatype"], output["shape"], body[offset:end])
        offset = end
    return outputs


def generate_body(request: InferRequest) -> bytes:
    """Return the body of a `generate` or `generate_stream` call; pictures go as base64, data URLs as they are."""
    fields: dict[str, Any] = {"id": request.request_id}
    for name, elements in request.inputs.items():
        fields[name] = [_image_text(element) for element in elements] if name == "image" else elements[0].decode()
    return json.dumps(fields).encode()


def _image_text(element: bytes) -> str:
    return element.decode() if element.startswith(b"data:") else base64.b64encode(element).decode()


def read_generate(event: Mapping[str, Any]) -> Outputs:
    """Read one response of `generate` or `generate_stream`; an `error` may come with any status, even 200."""
    if "error" in event:
        raise from_status("", str(event["error"]))
    return {name: _as_tensor(value) for name, value in event.items()}


def _as_tensor(value: Any) -> np.ndarray[Any, Any]:
    values = value if isinstance(value, list) else [value]
    return np.array([item.encode() if isinstance(item, str) else item for item in values], dtype=np.object_)


def error_text(body: bytes) -> str:
    """Return the message inside an error body: JSON with `error`, the same as an event, or plain text of a proxy."""
    text = body.decode(errors="replace").strip()
    try:
        return str(json.loads(text.removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


class EventReader:
    """Cuts a stream of bytes into the JSON values of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Mapping[str, Any]]:
        """Take what arrived, in pieces of any size, and yield the events that are now complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield parse_event(line.removeprefix(b"data:"))


def parse_event(text: bytes) -> Mapping[str, Any]:
    """Read the JSON object of an event or a `generate` response; raises ServerError for anything else."""
    try:
        event = json.loads(text)
    except ValueError as error:
        raise ServerError(f"the server sent something that is not JSON: {text[:100]!r}") from error
    if not isinstance(event, dict):
        raise ServerError(f"expected a JSON object, got {text[:100]!r}")
    return event
