# SPDX-License-Identifier: Apache-2.0
"""How perf_analyzer is called, found, and what becomes of its failures; a shell script stands in for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kimi_client.__main__ as command
from kimi_client import KimiClientError
from kimi_client.load import driver, perf_analyzer
from kimi_client.load.driver import Driver, Load, Server, arguments
from kimi_client.load.mix import Mix, Size
from kimi_client.load.perf_analyzer import PerfAnalyzer, find_perf_analyzer
from kimi_client.load.results import write_json
from kimi_client.load.server_figures import Reading

SERVER = Server("grpc:1", "http:2", "metrics:3")
MIX = Mix(image_sizes=(Size(16, 16, 1.0),))


def option(given: list[str], name: str) -> str:
    return given[given.index(name) + 1]


@pytest.mark.parametrize(
    ("load", "model", "protocol", "address", "is_streaming"),
    [
        (Load("grpc-stream", "concurrency", 4), "kimi_vl", "grpc", "grpc:1", True),
        (Load("grpc", "concurrency", 4), "kimi_vl_unary", "grpc", "grpc:1", False),
        (Load("http", "concurrency", 4), "kimi_vl_unary", "http", "http:2", False),
    ],
)
def test_i2_each_protocol_calls_the_model_that_it_can(
    load: Load, model: str, protocol: str, address: str, is_streaming: bool
) -> None:
    given = arguments(load, SERVER, 9, Path("in.json"), Path("out.json"))
    assert (option(given, "-m"), option(given, "-i"), option(given, "-u")) == (model, protocol, address)
    assert ("--streaming" in given) is is_streaming
    assert option(given, "--request-count") == "9"
    assert option(given, "--concurrency-range") == "4"


def test_open_loop_is_poisson() -> None:
    given = arguments(Load("grpc", "rate", 2.5), SERVER, 9, Path("in.json"), Path("out.json"))
    assert (option(given, "--request-rate-range"), option(given, "--request-distribution")) == ("2.5", "poisson")


def script(folder: Path, text: str) -> PerfAnalyzer:
    path = folder / "perf_analyzer"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return PerfAnalyzer(path)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    values = [Reading({}, {}), Reading({("kimi_vl", "fail"): (3, 9)}, {})]
    remaining = iter(values)
    monkeypatch.setattr(driver, "settled_figures", lambda *_: next(remaining))
    return values


def test_a_run_that_fails_is_reported_with_perf_analyzers_word(readings: list[Reading], tmp_path: Path) -> None:
    analyzer = script(
        tmp_path, 'echo "Request concurrency: 1"; echo "Thread [0] had error: image 0: broken" >&2; exit 99'
    )
    run = Driver(SERVER, analyzer, MIX, tmp_path, 5).run(Load("grpc-stream", "concurrency", 1), 5, 1.0)
    assert run.error == "Thread [0] had error: image 0: broken"
    assert (run.requests, run.failed, run.server_failed, run.agrees_with_server) == (0, 3, 3, True)
    assert readings


def test_a_run_that_hangs_is_ended(readings: list[Reading], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "GIVE_UP_AT_LEAST_S", 0.2)
    run = Driver(SERVER, script(tmp_path, "exec sleep 60"), MIX, tmp_path, 5).run(Load("grpc", "rate", 1), 5, 0.01)
    assert run.error == "perf_analyzer did not end within 0.2 s"
    assert readings


def test_every_run_has_pictures_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "settled_figures", lambda *_: Reading({}, {}))
    analyzer = script(tmp_path, f"cat {tmp_path}/inputs.json >> {tmp_path}/seen; echo >> {tmp_path}/seen; exit 1")
    sender = Driver(SERVER, analyzer, MIX, tmp_path, 3)
    for _ in range(2):
        sender.run(Load("grpc", "concurrency", 1), 10, 1.0)
    first, second = ((tmp_path / "seen").read_text().splitlines()[i] for i in (0, 1))
    pictures = [{entry["image"]["content"]["b64"] for entry in json.loads(text)["data"]} for text in (first, second)]
    assert len(pictures[0]) == len(pictures[1]) == 3
    assert not pictures[0] & pictures[1]


def test_one_that_does_not_start_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, working = tmp_path / "broken", tmp_path / "working"
    for folder in (broken, working):
        folder.mkdir()
    candidates = [script(broken, "exit 127"), PerfAnalyzer(tmp_path / "missing"), script(working, "echo 1.0")]
    monkeypatch.setattr(perf_analyzer, "_candidates", lambda: iter(candidates))
    assert find_perf_analyzer() == candidates[2]
    monkeypatch.setattr(perf_analyzer, "_candidates", lambda: iter(candidates[:2]))
    with pytest.raises(KimiClientError, match="no perf_analyzer runs on this machine; fetch one with"):
        find_perf_analyzer()


def test_its_libraries_come_before_those_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs")
    assert PerfAnalyzer(tmp_path, Path("/ours")).environment["LD_LIBRARY_PATH"] == "/ours:/theirs"
    assert PerfAnalyzer(tmp_path).environment["LD_LIBRARY_PATH"] == "/theirs"


def test_load_without_a_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["load", "--http", "127.0.0.1:9"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "given", [["--concurrency", "0"], ["--rate", "x"], ["--protocol", "ftp"], ["--compare", "only-one.json"]]
)
def test_wrong_arguments_exit_with_2(given: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main(["load", *given])
    assert exit_info.value.code == 2


def test_compare_says_what_got_worse_and_exits_with_6(
    run: Any, load_test: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "a.json", load_test([run(1)], "before"))
    write_json(tmp_path / "b.json", load_test([run(1, tokens_per_s=20.0)], "after"))
    both = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert command.main(["load", "--compare", *both, "--out", str(tmp_path)]) == 6
    assert capsys.readouterr().out == "worse: grpc-stream 1 in flight: tokens written 40 -> 20 tokens/s (x0.50)\n"
    assert "after against before" in (tmp_path / "compare.html").read_text()
    assert command.main(["load", "--compare", *reversed(both)]) == 0
    assert capsys.readouterr().out == "nothing got worse\n"
    assert command.main(["load", "--compare", both[0], str(tmp_path / "no.json")]) == 2
