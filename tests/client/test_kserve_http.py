# SPDX-License-Identifier: Apache-2.0
"""HTTP bodies against tritonclient's HTTP client, and events cut at every place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput

from kimi_client import InvalidRequest, ServerError, ServerUnavailable
from kimi_client.kserve_http import EventReader, error_text, generate_body, infer_body, read_generate, read_infer
from kimi_client.request import InferRequest
from kimi_client.shared_memory import Region
from kimi_client.tensors import pack_bytes

REQUEST = InferRequest(model="m", inputs={"text_input": [b"hi"], "image": [b"\xff\xd8", b""]}, request_id="r7")


def test_an_infer_body_says_what_tritonclients_says() -> None:
    inputs = [InferInput(name, [len(e)], "BYTES") for name, e in REQUEST.inputs.items()]
    for tensor, elements in zip(inputs, REQUEST.inputs.values(), strict=True):
        tensor.set_data_from_numpy(np.array(elements, dtype=np.object_))
    theirs, their_length = InferenceServerClient.generate_request_body(inputs, request_id="r7")
    ours, our_length = infer_body(REQUEST, {})
    assert ours[our_length:] == theirs[their_length:]
    assert json.loads(ours[:our_length]) == json.loads(theirs[:their_length])


def test_a_region_travels_by_name() -> None:
    body, header_length = infer_body(REQUEST, {"image": Region("psm_1", 12)})
    header = json.loads(body[:header_length])
    assert header["inputs"][1]["parameters"] == {"shared_memory_region": "psm_1", "shared_memory_byte_size": 12}
    assert body[header_length:] == pack_bytes([b"hi"])


def test_an_infer_response_reads_as_tritonclient_reads_it() -> None:
    outputs = {
        "text_output": ("BYTES", [1], pack_bytes(["ja 猫".encode()])),
        "prompt_tokens": ("INT32", [1], np.int32(9).tobytes()),
        "empty": ("BYTES", [0], b""),
    }
    header = json.dumps(
        {
            "outputs": [
                {"name": n, "datatype": d, "shape": s, "parameters": {"binary_data_size": len(r)}}
                for n, (d, s, r) in outputs.items()
            ]
        }
    ).encode()
    body = header + b"".join(raw for _, _, raw in outputs.values())
    ours = read_infer(body, len(header))
    theirs = InferenceServerClient.parse_response_body(body, header_length=len(header))
    for name in outputs:
        assert np.array_equal(ours[name], theirs.as_numpy(name)), name


def test_a_generate_body_is_json_with_base64_pictures() -> None:
    request = InferRequest(
        model="m", inputs={"text_input": ["猫?".encode()], "image": [b"\xff\xd8", b"data:,x"]}, request_id="r7"
    )
    assert json.loads(generate_body(request)) == {"id": "r7", "text_input": "猫?", "image": ["/9g=", "data:,x"]}


EVENTS = (
    'data: {"text_output": "猫 ", "prompt_tokens": 7}\n\ndata:{"text_output":"b\\n\\nc"}\r\n\r\n: comment\n\n'.encode()
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
def test_events_arrive_whole_however_the_stream_is_cut(size: int) -> None:
    reader = EventReader()
    pieces = [EVENTS[i : i + size] for i in range(0, len(EVENTS), size)]
    events = [event for piece in pieces for event in reader.feed(piece)]
    assert events == [{"text_output": "猫 ", "prompt_tokens": 7}, {"text_output": "b\n\nc"}]


@pytest.mark.parametrize("line", [b"data: {oops}\n", b"data: 3\n", b"data: \xff\n"])
def test_an_event_that_is_no_json_object_is_a_server_error(line: bytes) -> None:
    with pytest.raises(ServerError):
        list(EventReader().feed(line))


def test_a_generated_response_becomes_tensors() -> None:
    outputs = read_generate({"text_output": "猫", "prompt_tokens": 7, "model_name": "kimi_vl"})
    assert outputs["text_output"].item().decode() == "猫"
    assert outputs["prompt_tokens"].item() == 7


def test_d1_an_error_under_status_200_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match=r"^image 0: broken$"):
        read_generate({"error": "in ensemble 'kimi_vl', image 0: broken"})
    with pytest.raises(ServerUnavailable):
        read_generate({"error": "in ensemble 'kimi_vl', unavailable, try again: the queue is full"})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":"nope"}', "nope"),
        (b'data: {"error":"nope"}\n\n', "nope"),
        (b"<html>502 Bad Gateway</html>", "<html>502 Bad Gateway</html>"),
        (b"", ""),
        (b'"nope"', '"nope"'),
    ],
)
def test_error_bodies_of_all_kinds_give_their_text(body: bytes, text: str) -> None:
    assert error_text(body) == text
