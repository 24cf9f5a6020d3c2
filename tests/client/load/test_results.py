# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_client import InvalidRequest
from kimi_client.load.results import read_json, write_csv, write_json


def test_json_gives_back_the_same_test(run: Callable[..., Any], load_test: Callable[..., Any], tmp_path: Path) -> None:
    test = load_test([run(1), run(4, "http"), run(2, error="gave up", total_ms=None)])
    write_json(tmp_path / "x.json", test)
    assert read_json(tmp_path / "x.json") == test


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{}]}'])
def test_other_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"x\.json is no result of kimi-client load"):
        read_json(tmp_path / "x.json")


def test_csv_has_a_row_per_run_and_a_column_per_figure(
    run: Callable[..., Any], load_test: Callable[..., Any], tmp_path: Path
) -> None:
    write_csv(tmp_path / "x.csv", load_test([run(4, "http"), run(1)]))
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["protocol"], row["level"], row["ttft_ms_p50"]) for row in rows] == [
        ("http", "4", ""),
        ("grpc-stream", "1", "30"),
    ]
    assert rows[0]["total_ms_p99"] == "800"
    assert rows[0]["moonvit_compute_ms"] == "40"


def test_the_summary_adds_up_all_runs(run: Callable[..., Any], load_test: Callable[..., Any]) -> None:
    runs = [run(1, latencies_ms=(10.0, 30.0), ttfts_ms=(5.0,)), run(4, latencies_ms=(20.0,), failed=2, ttfts_ms=(9.0,))]
    assert load_test(runs).summary() == {
        "failed": 2,
        "requests": 40,
        "server_requests": 40,
        "tokens": 320,
        "server_tokens": 320,
        "p50_ms": 20.0,
        "p99_ms": 30.0,
        "ttft_p50_ms": 5.0,
        "tokens_per_s": 40.0,
    }


def test_the_summary_of_nothing_has_no_times(load_test: Callable[..., Any]) -> None:
    summary = load_test([]).summary()
    assert (summary["requests"], summary["p50_ms"], summary["ttft_p50_ms"], summary["tokens_per_s"]) == (
        0,
        None,
        None,
        0,
    )


@pytest.mark.parametrize(
    ("changed", "agrees"),
    [
        ({}, True),
        ({"server_tokens": None}, True),
        ({"server_requests": 21}, False),
        ({"server_tokens": 159}, False),
        ({"server_failed": 1}, False),
        ({"failed": 1, "server_failed": 1}, True),
    ],
)
def test_agreement_means_equal_counts(changed: dict[str, Any], agrees: bool, run: Callable[..., Any]) -> None:
    assert run(1, **changed).agrees_with_server is agrees
