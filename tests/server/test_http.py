# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of a live server: /generate, /generate_stream, KServe infer."""

from __future__ import annotations

import base64
import json
import urllib.request
from typing import Any

import pytest

pytestmark = pytest.mark.server
QUESTION = "What is in this picture?"
GREEDY = {"temperature": 0, "max_tokens": 12}


def b64(image: bytes) -> str:
    return base64.b64encode(image).decode()


def test_generate_answers_once_with_usage(caller: Any, png: Any) -> None:
    answer = caller.generate(QUESTION, image=[b64(png(56, 84))], **GREEDY)
    assert answer["text_output"] or answer["reasoning_output"]
    assert answer["finish_reason"] in ("stop", "length")
    assert 1 <= answer["completion_tokens"] <= 12
    assert answer["prompt_tokens"] > 6


def test_the_picture_changes_the_answer(caller: Any, png: Any) -> None:
    answers = {
        json.dumps(caller.generate(QUESTION, image=[b64(png(84, 84, seed=seed))], **GREEDY)["reasoning_output"])
        for seed in range(4)
    }
    assert len(answers) > 1


def test_base64_and_data_urls_and_messages_give_one_answer(caller: Any, png: Any) -> None:
    image = b64(png(56, 56))
    url = f"data:image/png;base64,{image}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    messages = json.dumps([{"role": "user", "content": content}])
    answers = [
        caller.generate(QUESTION, image=[image], **GREEDY),
        caller.generate(QUESTION, image=[url], **GREEDY),
        caller.generate(messages=messages, **GREEDY),
    ]
    kept = [(answer["reasoning_output"], answer["prompt_tokens"]) for answer in answers]
    assert kept[0] == kept[1] == kept[2]


def test_sampling_parameters_as_json_mean_the_same_as_fields(caller: Any) -> None:
    options = {"temperature": 0.7, "seed": 5, "max_tokens": 8}
    by_field = caller.generate(QUESTION, **options)
    by_json = caller.generate(QUESTION, sampling_parameters=json.dumps(options))
    assert by_field["reasoning_output"] == by_json["reasoning_output"]


def test_generate_stream_pieces_join_to_the_whole_answer(caller: Any, png: Any) -> None:
    image = [b64(png(56, 56))]
    whole = caller.generate(QUESTION, image=image, thinking=False, **GREEDY)
    pieces = caller.generate_stream(QUESTION, image=image, thinking=False, **GREEDY)
    assert "".join(piece["text_output"] for piece in pieces) == whole["text_output"]
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    assert pieces[-1]["completion_tokens"] == whole["completion_tokens"]
    assert len(pieces) > 1


def test_kserve_infer_answers_through_the_unary_model(caller: Any, png: Any) -> None:
    image = b64(png(56, 56))
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [QUESTION]},
        {"name": "image", "shape": [1], "datatype": "BYTES", "data": [image]},
    ]
    body = {"inputs": inputs, "parameters": {"temperature": 0, "max_tokens": 12}}
    status, answer = caller.post("/v2/models/kimi_vl_unary/infer", body)
    assert status == 200, answer
    outputs = {output["name"]: output["data"][0] for output in answer["outputs"]}
    streamed = caller.generate(QUESTION, image=[image], **GREEDY)
    assert {name: streamed[name] for name in ("text_output", "reasoning_output", "prompt_tokens")} == {
        name: outputs[name] for name in ("text_output", "reasoning_output", "prompt_tokens")
    }


def test_kimi_vision_over_http_returns_rows_and_grid(caller: Any, png: Any) -> None:
    inputs = [{"name": "image", "shape": [2], "datatype": "BYTES", "data": [b64(png(56, 56)), b64(png(28, 84))]}]
    outputs = [
        {"name": name, "parameters": {"binary_data": name == "image_embeds"}}
        for name in ("image_embeds", "image_grid_thw")
    ]
    body = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    request = urllib.request.Request(f"http://{caller.http_url}/v2/models/kimi_vision/infer", body)
    with urllib.request.urlopen(request, timeout=60) as response:
        header = int(response.headers["Inference-Header-Content-Length"])
        content = response.read()
    described = {output["name"]: output for output in json.loads(content[:header])["outputs"]}
    assert described["image_grid_thw"]["data"] == [1, 4, 4, 1, 6, 2]
    assert described["image_embeds"]["shape"] == [1, 4 + 3, 128]
    assert described["image_embeds"]["datatype"] == "BF16"
    assert len(content) - header == 7 * 128 * 2


def test_g3_plain_infer_of_the_streaming_model_is_refused_at_once(caller: Any) -> None:
    inputs = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [QUESTION]}]
    status, answer = caller.post("/v2/models/kimi_vl/infer", {"inputs": inputs})
    assert status >= 400
    assert "decoupled" in answer["error"]
    assert "error" not in caller.generate(QUESTION, **GREEDY)


def test_text_only_needs_no_picture(caller: Any) -> None:
    answer = caller.generate("Hello there", **GREEDY)
    assert answer["completion_tokens"] >= 1
    assert answer["cached_images"] == 0
