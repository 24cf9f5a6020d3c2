# SPDX-License-Identifier: Apache-2.0
"""Requests in, responses and errors out, against a stand-in for Triton's module."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kimi_triton.answer_line import AnswerLine
from kimi_triton.cancel_board import CancelBoard
from kimi_triton.errors import Cancelled, ConfigError, InvalidRequest, KimiError, Unavailable
from kimi_triton.metric import MetricSpec
from tests import fake_triton

fake_triton.install()
from kimi_triton import triton_io  # noqa: E402 (needs the stand-in)

ARGS = {
    "model_config": json.dumps({"name": "llm", "parameters": {"dtype": {"string_value": "float32"}}}),
    "model_instance_name": "llm_0_0",
    "model_instance_kind": "CPU",
    "model_instance_device_id": "0",
    "model_repository": "/models/llm",
}


def test_options_are_read_and_missing_ones_are_named() -> None:
    options = triton_io.StepOptions(ARGS)
    assert options.text("dtype") == "float32"
    assert options.integer("max_images", 3) == 3
    with pytest.raises(ConfigError, match="llm: parameter 'checkpoint' is empty"):
        options.path("checkpoint")
    with pytest.raises(ConfigError, match="'dtype' is 'float32', expected an integer"):
        options.integer("dtype", 1)


def test_numpy_2_is_refused_at_start() -> None:
    triton_io.check_numpy("1.26.4")
    with pytest.raises(ConfigError, match=r"NumPy 2\.3\.1"):
        triton_io.check_numpy("2.3.1")


def test_bytes_inputs_keep_trailing_zeros_and_may_be_missing() -> None:
    request = fake_triton.Request({"image": fake_triton.bytes_tensor(b"a\0", b"")})
    assert triton_io.read_bytes(request, "image") == [b"a\0", b""]
    assert triton_io.read_bytes(request, "messages") is None
    assert triton_io.read_one(request, "messages") is None
    with pytest.raises(InvalidRequest, match="image has 2 elements, expected 1"):
        triton_io.read_one(request, "image")
    assert triton_io.bytes_array([b"a\0"])[0] == b"a\0"


def test_a_tensor_in_gpu_memory_is_an_error() -> None:
    request = fake_triton.Request({"image_grid_thw": np.zeros((1, 1, 3), np.int64)}, on_cpu=False)
    with pytest.raises(KimiError, match="image_grid_thw arrived in GPU memory"):
        triton_io.read_array(request, "image_grid_thw")
    with pytest.raises(KimiError, match="image_grid_thw arrived in GPU memory"):
        triton_io.read_torch(request, "image_grid_thw")


def test_bf16_goes_through_dlpack_both_ways() -> None:
    rows = torch.randn(1, 3, 4).bfloat16()
    request = fake_triton.Request({"image_embeds": rows})
    assert torch.equal(triton_io.read_torch(request, "image_embeds"), rows)
    (response,) = triton_io.answer_each(lambda _: {"image_embeds": rows}, [request])
    assert response.output_tensors[0].array is rows


def test_only_requested_outputs_are_sent() -> None:
    outputs = {"pixel_values": np.zeros(1), "input_ids": np.zeros(1)}
    for wanted, sent in (((), ["pixel_values", "input_ids"]), (("input_ids",), ["input_ids"])):
        (response,) = triton_io.answer_each(lambda _: outputs, [fake_triton.Request({}, outputs=wanted)])
        assert [tensor.name for tensor in response.output_tensors] == sent


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("image 1: bad"), "INVALID_ARG"),
        (Unavailable("busy"), "UNAVAILABLE"),
        (Cancelled("gone"), "CANCELLED"),
        (KimiError("ours"), "INTERNAL"),
    ],
)
def test_each_error_has_its_code_and_spares_the_neighbours(error: KimiError, code: str) -> None:
    def answer(request: fake_triton.Request) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
        if request.tensors:
            raise error
        return {"text_output": np.zeros(1)}

    good, bad = fake_triton.Request({}), fake_triton.Request({"image": np.zeros(1)})
    responses = triton_io.answer_each(answer, [good, bad, good])
    assert [response.error is None for response in responses] == [True, False, True]
    assert responses[1].error.code == code
    assert responses[1].error.message.endswith(str(error))


def test_an_unforeseen_exception_is_logged_and_shown_by_type_only() -> None:
    def answer(_request: object) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
        raise RuntimeError("the secret prompt")

    fake_triton.Logger.errors.clear()
    (response,) = triton_io.answer_each(answer, [fake_triton.Request({})])
    assert response.error.code == "INTERNAL"
    assert "RuntimeError" in response.error.message
    assert "secret" not in response.error.message
    assert "RuntimeError" in fake_triton.Logger.errors[0]


def test_a_batch_gets_one_response_each_in_order(tmp_path: Path) -> None:
    board = CancelBoard(tmp_path)
    requests = [fake_triton.Request({}) for _ in range(3)]
    results = [{"image_embeds": np.zeros(1)}, InvalidRequest("request 1"), {"image_embeds": np.ones(1)}]
    responses = triton_io.answer_batch(lambda _: results, requests, board)
    assert [response.error and response.error.message for response in responses] == [None, "request 1", None]

    def fail(_requests: object) -> list[dict[str, np.ndarray]]:  # type: ignore[type-arg]
        raise Unavailable("worker 1 died")

    assert [response.error.code for response in triton_io.answer_batch(fail, requests, board)] == ["UNAVAILABLE"] * 3


def test_a_stream_ends_once_with_data_or_an_error() -> None:
    request = fake_triton.Request({})
    stream = triton_io.ResponseStream(request)
    stream.send({"text_output": np.zeros(1)}, final=False)
    stream.send({"text_output": np.zeros(1)}, final=True)
    assert [flags for _, flags in request.sender.sent] == [0, 1]
    request = fake_triton.Request({})
    triton_io.ResponseStream(request).fail(InvalidRequest("no"))
    ((response, flags),) = request.sender.sent
    assert (response.error.code, flags) == ("INVALID_ARG", 1)


def test_g9_a_request_is_in_the_line_until_its_final_response(tmp_path: Path) -> None:
    line = AnswerLine(tmp_path / "answers", 2)
    requests = [fake_triton.Request({"received_s": np.array([[place]])}) for place in (1.5, 2.5)]
    streams = [triton_io.AnswerStream(request, line) for request in requests]
    assert len(line) == 2
    streams[0].send({"text_output": np.zeros(1)}, final=False)
    assert len(line) == 2
    streams[0].send({"text_output": np.zeros(1)}, final=True)
    assert len(line) == 1
    streams[1].respond_error(InvalidRequest("no"))
    assert len(line) == 0
    triton_io.AnswerStream(fake_triton.Request({}), line).fail(InvalidRequest("asked directly"))
    assert len(line) == 0


@pytest.mark.parametrize(
    ("raw", "timeout_us", "expected"), [("", 0, None), ('{"timeout": 1500000}', 0, 1.5), ("{}", 250_000, 0.25)]
)
def test_timeouts_are_microseconds(raw: str, timeout_us: int, expected: float | None) -> None:
    assert triton_io.timeout_s(fake_triton.Request({}, raw, timeout_us=timeout_us)) == expected


def test_the_time_before_a_step_counts_into_the_limit() -> None:
    request = fake_triton.Request({"received_s": np.array([[time.monotonic() - 2]])}, timeout_us=5_000_000)
    assert triton_io.timeout_s(request) == pytest.approx(3, abs=0.5)


def test_g4_what_is_cancelled_or_overdue_takes_no_part_in_a_batch(tmp_path: Path) -> None:
    board = CancelBoard(tmp_path)
    board.post("gone")
    overdue = {"received_s": np.array([[time.monotonic() - 2]])}
    requests = [
        fake_triton.Request({}, id="first"),
        fake_triton.Request({}, id="gone"),
        fake_triton.Request(overdue, id="late", timeout_us=1_000_000),
        fake_triton.Request({}),
    ]
    seen: list[str] = []

    def work(wanted: Sequence[fake_triton.Request]) -> list[dict[str, Any]]:
        seen.extend(request.id for request in wanted)
        return [{"image_embeds": np.zeros(1)} for _ in wanted]

    responses = triton_io.answer_batch(work, requests, board)
    assert seen == ["first", ""]
    assert [response.error and response.error.code for response in responses] == [
        None, "CANCELLED", "UNAVAILABLE", None,
    ]  # fmt: skip
    assert board.outcome("gone") is True
    assert triton_io.answer_batch(work, requests[1:2], board)[0].error is None


def test_batches_are_answered_in_threads_as_many_at_once_as_there_are() -> None:
    at_work, proceed = threading.Semaphore(0), threading.Event()

    def answer(requests: Sequence[object]) -> list[fake_triton.InferenceResponse]:
        at_work.release()
        assert proceed.wait(10)
        return [fake_triton.InferenceResponse() for _ in requests]

    threads = triton_io.BatchThreads(answer, 2)
    batches = [[fake_triton.Request({}) for _ in range(size)] for size in (2, 1, 3)]
    for batch in batches[:2]:
        threads.submit(batch)
        assert at_work.acquire(timeout=10)
    third = threading.Thread(target=threads.submit, args=(batches[2],))
    third.start()
    third.join(0.1)
    assert third.is_alive()  # it waits with the server, which adds to it
    proceed.set()
    third.join(10)
    threads.stop()
    assert [[flags for _, flags in request.sender.sent] for batch in batches for request in batch] == [[1]] * 6


def test_a_batch_whose_answer_raises_is_answered_with_errors() -> None:
    def fail(_requests: Sequence[object]) -> list[object]:
        raise Unavailable("gone")

    threads = triton_io.BatchThreads(fail, 1)
    requests = [fake_triton.Request({}), fake_triton.Request({})]
    threads.submit(requests)
    threads.stop()
    assert [request.sender.sent[0][0].error.code for request in requests] == ["UNAVAILABLE"] * 2


def test_metrics_are_labelled_with_model_and_instance() -> None:
    specs = [
        MetricSpec("images", "counter", "Images"),
        MetricSpec("bytes", "gauge", "Bytes"),
        MetricSpec("ms", "histogram", "Milliseconds", (1, 10)),
    ]
    metrics = triton_io.StepOptions(ARGS).metrics(specs)
    metrics["images"].increment(2)
    metrics["ms"].observe(3)
    assert list(metrics) == ["images", "bytes", "ms"]
    for spec, metric in zip(specs, metrics.values(), strict=True):
        assert metric.family.name == spec.name
        assert metric.family.kind == spec.kind
        assert metric.labels == {"model": "llm", "instance": "llm_0_0"}
    assert metrics["ms"].buckets == [1, 10]
    assert metrics["images"].buckets is None
