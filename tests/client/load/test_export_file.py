# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_client import KimiClientError
from kimi_client.load.export_file import read_export
from kimi_client.load.figures import Percentiles, duration_s

MS = 1_000_000


def outputs(tokens: int, reason: str = "") -> dict[str, Any]:
    return {
        "text_output": "x",
        "finish_reason": reason,
        "prompt_tokens": 7,
        "completion_tokens": tokens,
        "cached_images": 1,
    }


def request(sent_ms: int, responses: list[tuple[int, dict[str, Any]]], image: str = "") -> dict[str, Any]:
    return {
        "timestamp": sent_ms * MS,
        "request_inputs": {"image": image},
        "response_timestamps": [time_ms * MS for time_ms, _ in responses],
        "response_outputs": [data for _, data in responses],
    }


def export(path: Path, requests: list[dict[str, Any]]) -> Path:
    text = json.dumps({"experiments": [{"experiment": {}, "requests": requests, "window_boundaries": []}]})
    path.write_bytes(text.replace("PICTURE", "\xff\xd8\\u0000").encode("latin-1"))
    return path


def test_times_and_counts_are_read_from_a_file_with_raw_bytes_in_it(tmp_path: Path) -> None:
    streamed = request(100, [(130, outputs(1)), (140, outputs(3)), (170, outputs(5, "stop"))], image="PICTURE")
    whole = request(150, [(400, outputs(9, "length"))])
    first, second = read_export(export(tmp_path / "p.json", [streamed, whole]))
    assert (first.first_ms, first.total_ms, first.token_gap_ms) == (30, 70, 10)
    assert (first.completion_tokens, first.prompt_tokens, first.cached_images) == (5, 7, 1)
    assert (second.first_ms, second.total_ms, second.token_gap_ms) == (250, 250, None)
    assert duration_s([first, second]) == 0.3


def test_i2_an_empty_final_response_is_no_token_and_no_time(tmp_path: Path) -> None:
    records = read_export(export(tmp_path / "p.json", [request(0, [(10, outputs(1, "stop")), (90, {})])]))
    assert [(record.total_ms, record.completion_tokens) for record in records] == [(10, 1)]


@pytest.mark.parametrize("responses", [[], [(10, outputs(1))], [(10, {})]])
def test_a_request_without_its_end_is_an_error(responses: list[Any], tmp_path: Path) -> None:
    with pytest.raises(KimiClientError, match="has no finished answer"):
        read_export(export(tmp_path / "p.json", [request(0, responses)]))


def test_no_requests_are_no_records(tmp_path: Path) -> None:
    assert read_export(export(tmp_path / "p.json", [])) == []
    assert duration_s([]) == 0.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], (5, 5, 5, 5)),
        (list(range(1, 101)), (50, 90, 95, 99)),
        (list(range(100, 0, -1)), (50, 90, 95, 99)),
        ([1.0, 2.0], (1, 2, 2, 2)),
    ],
)
def test_percentiles_are_values_that_were_measured(values: list[float], expected: tuple[float, ...]) -> None:
    assert Percentiles.of(values) == Percentiles(*expected)


def test_nothing_has_no_percentiles() -> None:
    assert Percentiles.of([]) is None
