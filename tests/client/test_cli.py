# SPDX-License-Identifier: Apache-2.0
"""The command over a transport that lives in the test: what it prints where, and its exit codes."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kimi_client.__main__ as command
from kimi_client import (
    Health,
    InvalidRequest,
    KimiClient,
    KimiClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)


@pytest.fixture
def served(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    transport = fake()
    monkeypatch.setattr(command, "KimiClient", functools.partial(KimiClient, transport=transport))
    return transport


def sent(transport: Any, index: int = 0) -> dict[str, Any]:
    inputs = transport.requests[index].inputs
    return {name: inputs[name][0].decode() for name in inputs if name != "image"}


def test_ask_streams_to_stdout_and_says_nothing_else_in_a_pipe(
    served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(b"png")
    assert (
        command.main(["ask", "What?", str(tmp_path / "cat.png"), "--max-tokens", "5", "--stop", "x", "--no-thinking"])
        == 0
    )
    assert capsys.readouterr() == ("a b c\n", "")
    assert served.requests[0].inputs["image"] == [b"png"]
    options = json.loads(sent(served)["sampling_parameters"])
    assert options == {"max_tokens": 5, "stop": ["x"], "thinking": False, "stream": True}


def test_ask_writes_json(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ask", "What?", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("c", "stop", 3)
    assert json.loads(sent(served)["sampling_parameters"]) == {"stream": False}


def test_ask_reads_the_question_from_stdin(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("long\nquestion"))
    assert command.main(["ask", "-", "--no-stream"]) == 0
    assert sent(served)["text_input"] == "long\nquestion"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ServerError("broke"), 1),
        (InvalidRequest("image 0: broken"), 2),
        (ServerUnavailable("queue full"), 3),
        (RequestTimeout("no answer within 1 s"), 4),
        (RequestCancelled("stopped"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_tell_errors_apart_and_errors_are_one_line(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise error

    monkeypatch.setattr(command, "ask", fail)
    assert command.main(["ask", "What?", "--no-stream"]) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == (f"kimi-client: {error}\n" if isinstance(error, KimiClientError) else "")


def test_a_closed_pipe_ends_the_command_quietly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(command, "ask", fail)
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert command.main(["ask", "What?"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [[], ["ask"], ["ask", "x", "--top-k", "many"], ["ask", "x", "--header", "token"]])
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main(arguments)
    assert exit_info.value.code == 2
    assert "usage: kimi-client" in capsys.readouterr().err


def test_embed_writes_one_tensor_per_picture_in_batches(
    served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = [str(tmp_path / f"{i}.png") for i in range(5)]
    for path in paths:
        Path(path).write_bytes(b"png")
    rows = np.arange(4, dtype=np.float32)[None, :, None].repeat(8, axis=2)
    served.embeds = {"image_embeds": rows, "image_grid_thw": np.array([[[1, 2, 4], [1, 4, 2]]])}
    out = tmp_path / "x.safetensors"
    assert command.main(["embed", *paths[:4], paths[0], "--out", str(out), "--batch", "2"]) == 0
    assert [len(request.inputs["image"]) for request in served.requests] == [2, 2]
    assert "4/4 images" in capsys.readouterr().err
    assert set(safetensors_names(out)) == set(paths[:4])


def safetensors_names(path: Path) -> list[str]:
    header = path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    return [name for name in json.loads(header) if name != "__metadata__"]


def test_embed_names_the_bad_file_and_leaves_no_half_file(
    served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ok.png").write_bytes(b"png")
    served.embeds = {"image_embeds": np.zeros((1, 1, 8), np.float32), "image_grid_thw": np.array([[[1, 2, 2]]])}
    arguments = [str(tmp_path / "ok.png"), str(tmp_path / "no.png"), "--out", str(tmp_path / "x"), "--batch", "1"]
    assert command.main(["embed", *arguments]) == 2
    assert f"kimi-client: {tmp_path}/no.png: cannot read" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "x.part").exists()


def test_embed_into_a_folder_that_is_not_there_is_one_line(
    served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["embed", "a.png", "--out", str(tmp_path / "no" / "x")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert served.requests == []


@pytest.mark.parametrize(("is_ready", "code"), [(True, 0), (False, 3)])
def test_health_tells_by_its_exit_code(
    is_ready: bool, code: int, served: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def state(models: Any) -> Health:
        return Health(True, True, {name: is_ready for name in models}, "2.51.0")

    monkeypatch.setattr(served, "health", state)
    assert command.main(["health"]) == code
    assert ("kimi_vl        ready" if is_ready else "kimi_vl        not ready") in capsys.readouterr().out
    assert command.main(["health", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["models"]["kimi_vl"] is is_ready


def talk(lines: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return command.main(["chat", *arguments])


def test_chat_keeps_the_history_and_its_pictures(served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"png")
    assert talk(f"/image {tmp_path}/cat.png\nWhat?\n\nSure?\n", monkeypatch, "--system", "be brief") == 0
    first, second = (json.loads(sent(served, i)["messages"]) for i in (0, 1))
    assert [message["role"] for message in first] == ["system", "user"]
    assert second[:2] == first
    assert second[2:] == [{"role": "assistant", "content": "a b c"}, {"role": "user", "content": "Sure?"}]
    assert [request.inputs["image"] for request in served.requests] == [[b"png"], [b"png"]]


def test_chat_forgets_on_reset(served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"png")
    assert talk(f"Hi\n/image {tmp_path}/cat.png\n/reset\nHo\n/quit\nnever\n", monkeypatch) == 0
    assert len(served.requests) == 2
    assert json.loads(sent(served, 1)["messages"]) == [{"role": "user", "content": "Ho"}]


@pytest.mark.parametrize("line", ["/image nowhere.png", "/image", "/nonsense"])
def test_chat_in_a_pipe_ends_at_the_first_error(
    line: str, served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(f"{line}\nHi\n", monkeypatch) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert served.requests == []


class Person(io.StringIO):
    """Standard input with somebody in front of it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def sits_down(lines: str) -> None:
        monkeypatch.setattr("sys.stdin", Person(lines))

    return sits_down


def test_chat_with_a_person_goes_on_after_an_error_and_forgets_the_failed_turn(
    served: Any, person: Callable[[str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    person("one\n/image nowhere.png\ntwo\n")
    failing = iter([InvalidRequest("too long"), None])
    original = served.stream

    async def stream(request: Any) -> Any:
        async for piece in original(request):
            yield piece
        if error := next(failing):
            raise error

    monkeypatch.setattr(served, "stream", stream)
    assert command.main(["chat"]) == 0
    assert json.loads(sent(served, 1)["messages"]) == [{"role": "user", "content": "two"}]
    assert "kimi-client: too long" in capsys.readouterr().err


def test_embeddings_in_the_file_are_those_of_the_picture(served: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    rows = np.array([[[1.5, -2.0], [0.25, 3.0]]], np.float32)
    served.embeds = {"image_embeds": rows, "image_grid_thw": np.array([[[1, 2, 4]]])}
    out = tmp_path / "x.safetensors"
    command.main(["embed", str(tmp_path / "a.png"), "--out", str(out)])
    header_length = int.from_bytes(out.read_bytes()[:8], "little")
    halves = np.frombuffer(out.read_bytes()[8 + header_length :], "<u2")
    assert np.array_equal((halves.astype(np.uint32) << 16).view(np.float32).reshape(2, 2), rows[0])
