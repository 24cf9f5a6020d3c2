# SPDX-License-Identifier: Apache-2.0
"""Plain calls to a live server with the tools a user has: HTTP with JSON, and tritonclient."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException


@dataclass
class Answer:
    """All responses of one request over a gRPC stream."""

    texts: list[str] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    error: InferenceServerException | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


def bytes_input(name: str, elements: list[bytes]) -> grpcclient.InferInput:
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return grpcclient.InferInput(name, [len(elements)], "BYTES").set_data_from_numpy(array)


def request_inputs(text: str | None, images: list[bytes] | None, messages: Any = None) -> list[grpcclient.InferInput]:
    inputs = [] if text is None else [bytes_input("text_input", [text.encode()])]
    if messages is not None:
        inputs.append(bytes_input("messages", [json.dumps(messages).encode()]))
    if images is not None:
        inputs.append(bytes_input("image", images))
    return inputs


class Caller:
    """One live server as its callers see it."""

    def __init__(self, http_url: str, grpc_url: str) -> None:
        self.http_url, self.grpc_url = http_url, grpc_url

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """POST JSON; returns (status, parsed body)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.http_url}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as exc:
            return exc.code, json.loads(exc.read())

    def generate(self, text: str | None = None, **fields: Any) -> dict[str, Any]:
        """`/generate`; the error body counts, whatever the status."""
        body = fields if text is None else {"text_input": text, **fields}
        answer: dict[str, Any] = self.post("/v2/models/kimi_vl/generate", body)[1]
        return answer

    def generate_stream(self, text: str, **fields: Any) -> list[dict[str, Any]]:
        """`/generate_stream`: the data of each server-sent event."""
        body = json.dumps({"text_input": text, "stream": True, **fields}).encode()
        request = urllib.request.Request(f"http://{self.http_url}/v2/models/kimi_vl/generate_stream", body)
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = response.read().decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line]

    def stream(self, requests: list[dict[str, Any]]) -> dict[str, Answer]:
        """Several requests on one gRPC stream; keys are request ids."""
        answers = {request["request_id"]: Answer() for request in requests}
        events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        with grpcclient.InferenceServerClient(self.grpc_url) as client:
            client.start_stream(callback=lambda result, error: events.put((result, error)))
            for request in requests:
                client.async_stream_infer("kimi_vl", enable_empty_final_response=True, **request)
            open_requests = set(answers)
            while open_requests:
                result, error = events.get(timeout=60)
                if error is not None:  # an error of a stream does not carry its id
                    assert len(answers) == 1, str(error)
                    next(iter(answers.values())).error = error
                    break
                response = result.get_response()
                answer = answers[response.id]
                final = response.parameters["triton_final_response"].bool_param
                answer.finals.append(final)
                if response.outputs:
                    answer.last = {name: result.as_numpy(name)[0] for name in OUTPUTS}
                    answer.texts.append(answer.last["text_output"].decode())
                if final:
                    open_requests.discard(response.id)
        return answers

    def ask(self, text: str | None, images: list[bytes] | None = None, messages: Any = None, **options: Any) -> Answer:
        """One request on a gRPC stream of its own."""
        inputs = request_inputs(text, images, messages)
        request = {"request_id": "one", "inputs": inputs, "parameters": options}
        return self.stream([request])["one"]

    def unary(
        self, text: str | None, images: list[bytes] | None = None, messages: Any = None, **options: Any
    ) -> dict[str, Any]:
        """gRPC ModelInfer on kimi_vl_unary. Raises InferenceServerException."""
        with grpcclient.InferenceServerClient(self.grpc_url) as client:
            inputs = request_inputs(text, images, messages)
            result = client.infer("kimi_vl_unary", inputs, parameters=options)
            return {name: result.as_numpy(name)[0] for name in OUTPUTS}

    def embed(self, images: list[bytes]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """kimi_vision: (num_image_tokens, text_hidden_size) as float32, (num_images, 3)."""
        with grpcclient.InferenceServerClient(self.grpc_url) as client:
            result = client.infer("kimi_vision", [bytes_input("image", images)])
            return result.as_numpy("image_embeds")[0], result.as_numpy("image_grid_thw")[0]


OUTPUTS = ("text_output", "reasoning_output", "finish_reason", "prompt_tokens", "completion_tokens", "cached_images")


@pytest.fixture(scope="session")
def caller(live_server: Any) -> Caller:
    return Caller(live_server.http_url, live_server.grpc_url)


@pytest.fixture(scope="session")
def caller_vl(live_server_vl: Any) -> Caller:
    return Caller(live_server_vl.http_url, live_server_vl.grpc_url)
