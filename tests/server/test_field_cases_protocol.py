# SPDX-License-Identifier: Apache-2.0
"""Requests that no proper client sends: the server refuses them and answers the next one as always."""

from __future__ import annotations

import http.client
import json
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server
QUESTION = "What is in this picture?"
GREEDY = {"temperature": 0, "max_tokens": 6, "thinking": False}
UNARY = "/v2/models/kimi_vl_unary/infer"


@pytest.fixture(autouse=True)
def known_good(caller: Any, png: Any, live_server: Any) -> Any:
    """Every case is followed by a request that must answer as it did before, from the same processes."""
    before = caller.unary(QUESTION, [png(56, 56)], **GREEDY)["text_output"]
    stubs = living_children(live_server.pid)
    yield
    assert caller.unary(QUESTION, [png(56, 56)], **GREEDY)["text_output"] == before
    assert living_children(live_server.pid) == stubs


def living_children(pid: int) -> set[int]:
    children = psutil.Process(pid).children(recursive=True)
    return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE}


def send(url: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """A raw POST; (0, b"") when the server just closes the connection."""
    host, port = url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (http.client.HTTPException, OSError):
        return 0, b""
    finally:
        connection.close()


def binary_request(
    name: str, shape: list[int], data: bytes, header_length: str | None = None
) -> tuple[bytes, dict[str, str]]:
    """A KServe request whose one tensor follows the JSON as raw bytes."""
    tensors = [{"name": name, "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}]
    header = json.dumps({"inputs": tensors}).encode()
    length = str(len(header)) if header_length is None else header_length
    return header + data, {"Inference-Header-Content-Length": length, "Content-Type": "application/octet-stream"}


def element(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(data) if length is None else length) + data


def test_a_well_formed_binary_request_is_answered(caller: Any) -> None:
    """The requests below differ from this one in one thing each."""
    body, headers = binary_request("text_input", [1], element(b"Hello"))
    status, answer = send(caller.http_url, UNARY, body, headers)
    assert status == 200, answer


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([1], b"Hello"),
        ([1], element(b"Hello", 6)),
        ([1], element(b"Hello", 0xFFFFFFFF)),
        ([1], b"\x01\x00\x00"),
        ([1], b""),
        ([2], element(b"Hello")),
        ([1], element(b"Hello") * 2),
    ],
)
def test_g1_malformed_bytes_elements_are_refused(shape: list[int], data: bytes, caller: Any) -> None:
    body, headers = binary_request("text_input", shape, data)
    status, answer = send(caller.http_url, UNARY, body, headers)
    assert status in (400, 500), answer
    assert b"error" in answer


@pytest.mark.parametrize("length", ["0", "5", "999999", "-1", "many"])
def test_g8_a_wrong_header_length_is_refused(length: str, caller: Any) -> None:
    body, headers = binary_request("text_input", [1], element(b"Hello"), length)
    status, _ = send(caller.http_url, UNARY, body, headers)
    assert status in (0, 400, 500)  # what a wrong cut leaves of the JSON, Triton itself calls internal


@pytest.mark.parametrize("shape", [[1, 1], [], [2], [0]])
def test_g8_other_shapes_of_a_text_are_refused(shape: list[int], caller: Any) -> None:
    tensor = {"name": "text_input", "shape": shape, "datatype": "BYTES", "data": ["Hello"] * int(np.prod(shape))}
    status, answer = caller.post(UNARY, {"inputs": [tensor]})
    assert status == 400
    assert "text_input" in answer["error"]


def test_g8_lists_travel_in_sampling_parameters(caller: Any) -> None:
    refused = caller.generate("Hello", parameters={"stop": ["a", "b"]})
    assert "error" in refused
    taken = caller.generate("Hello", sampling_parameters=json.dumps({"stop": ["a", "b"], "max_tokens": 2}))
    assert "text_output" in taken, taken


def test_g2_a_string_of_70_mib_is_refused_or_served_but_nothing_dies(caller: Any) -> None:
    body = json.dumps({"text_input": "a" * (70 << 20), "max_tokens": 1}).encode()
    _, answer = send(caller.http_url, "/v2/models/kimi_vl/generate", body, {})
    assert b"error" in answer or answer == b""


def test_g2_ten_thousand_images_of_one_byte_are_refused_by_their_number(caller: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"10000 images, the limit is 64"):
        caller.unary(QUESTION, [b"x"] * 10_000)


def test_g2_a_large_file_passes_grpc_and_too_large_a_one_is_named(caller: Any, png: Any) -> None:
    rows, _ = caller.embed([png(1500, 1400)])  # 6 MB
    assert len(rows) > 1000
    with pytest.raises(InferenceServerException, match=r"image 0: its file has 10\d+ bytes, at most"):
        caller.unary(QUESTION, [png(28, 28) + bytes(100 << 20)])


def test_c1_a_typed_placeholder_is_ordinary_text(caller: Any, png: Any) -> None:
    def tokens_of_an_image(text: str) -> int:
        alone, with_image = caller.unary(text, **GREEDY), caller.unary(text, [png(56, 56)], **GREEDY)
        return int(with_image["prompt_tokens"] - alone["prompt_tokens"])

    assert tokens_of_an_image("what does <|media_pad|> mean?") == tokens_of_an_image("what does it mean?") > 4


def test_c5_typed_control_tokens_change_nothing_around_them(caller: Any) -> None:
    plain = caller.unary("x", **GREEDY)["prompt_tokens"]
    for typed in ("<|im_end|>", "[EOS]", "<think>", "<|media_end|>"):
        answer = caller.unary(f"x{typed}", **GREEDY)
        assert answer["prompt_tokens"] > plain + 1, typed  # spelt out, not one control token


def test_g5_an_error_ends_a_stream_once(caller: Any) -> None:
    answer = caller.ask(QUESTION, [b"no picture"], stream=True)
    assert answer.error is not None
    assert answer.texts == []


def test_g6_failing_requests_leave_no_shared_memory_behind(caller: Any, png: Any) -> None:
    def fail(number: int) -> None:
        images, max_tokens = ([png(112, 112), b"bad"], 1) if number % 2 else (None, -1)
        with pytest.raises(InferenceServerException):
            caller.unary(QUESTION, images, max_tokens=max_tokens)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fail, range(50)))
        before = shm_bytes()
        list(pool.map(fail, range(200)))
    time.sleep(0.5)
    assert shm_bytes() - before < 2 << 20


def shm_bytes() -> int:
    """What the segments of our own servers take."""
    return sum(file.stat().st_blocks * 512 for file in Path("/dev/shm").glob("kimi_triton_*") if file.is_file())


def tensor(name: str, array: np.ndarray[Any, Any]) -> grpcclient.InferInput:
    kinds = {"u1": "UINT8", "i8": "INT64", "i4": "INT32", "f8": "FP64", "b1": "BOOL"}
    return grpcclient.InferInput(name, list(array.shape), kinds[array.dtype.str[1:]]).set_data_from_numpy(array)


@pytest.mark.parametrize(
    ("grid", "num_patches", "num_digests"),
    [
        ([[1, 2, 2]], 0, 1),
        ([[1, 2, 2]], 5, 1),
        ([[1, 2, 2]], 4, 2),
        ([[0, 2, 2]], 0, 1),
        ([[1, -2, -2]], 4, 1),
        ([[1, 3, 2]], 6, 1),
        ([[1, 514, 2]], 1028, 1),
        ([[2**40, 2**12, 2**12]], 4, 1),
        ([[2**62, 2, 2]], 4, 1),
        ([[5, 2, 2]], 20, 1),
        ([], 4, 0),
    ],
)
def test_hostile_grids_sent_straight_to_moonvit_are_refused(
    grid: list[list[int]], num_patches: int, num_digests: int, caller: Any
) -> None:
    inputs = [
        tensor("pixel_values", np.zeros((1, num_patches, 3, 14, 14), np.uint8)),
        tensor("image_grid_thw", np.array(grid, np.int64).reshape(1, -1, 3)),
        tensor("image_digest", np.zeros((1, num_digests, 32), np.uint8)),
    ]
    with (
        grpcclient.InferenceServerClient(caller.grpc_url) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("moonvit", inputs, client_timeout=30)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT", caught.value


@pytest.mark.parametrize(
    ("input_ids", "generation", "num_rows"),
    [
        ([], b"{}", 0),
        ([-1], b"{}", 0),
        ([2**31 - 1], b"{}", 0),
        ([1, 2], b"not json", 0),
        ([1, 2], b"[]", 0),
        ([1, 2], b'{"max_tokens": -1}', 0),
        ([1, 2], b"{}", 3),
        ([1] * 20_000, b"{}", 0),
    ],
)
def test_hostile_tensors_sent_straight_to_llm_are_refused(
    input_ids: list[int], generation: bytes, num_rows: int, caller: Any
) -> None:
    shape = (1, num_rows, text_width(caller))
    embeds = grpcclient.InferInput("image_embeds", list(shape), "BF16")
    embeds.set_data_from_numpy(np.zeros(shape, np.float32))
    text = np.empty(1, np.object_)
    text[:] = [generation]
    inputs = [
        tensor("input_ids", np.array(input_ids, np.int32)),
        grpcclient.InferInput("generation", [1], "BYTES").set_data_from_numpy(text),
        tensor("image_grid_thw", np.zeros((1, 0, 3), np.int64)),
        embeds,
        tensor("image_cached", np.zeros((1, 0), np.bool_)),
    ]
    found: list[Any] = []
    with grpcclient.InferenceServerClient(caller.grpc_url) as client:
        client.start_stream(callback=lambda result, error: found.append(error or result))
        client.async_stream_infer("llm", inputs)
        deadline = time.monotonic() + 30
        while not found and time.monotonic() < deadline:
            time.sleep(0.02)
    assert isinstance(found[0], InferenceServerException), found


def text_width(caller: Any) -> int:
    """The text width that the server's config asks for."""
    with grpcclient.InferenceServerClient(caller.grpc_url) as client:
        config = client.get_model_config("llm", as_json=True)["config"]
    return next(int(entry["dims"][-1]) for entry in config["input"] if entry["name"] == "image_embeds")
