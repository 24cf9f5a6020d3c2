# SPDX-License-Identifier: Apache-2.0
"""Cancellations between the processes of one server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kimi_triton import cancel_board
from kimi_triton.cancel_board import CancelBoard
from kimi_triton.cancel_desk import ANSWER_WITHIN_S, CancelDesk
from kimi_triton.errors import ConfigError, InvalidRequest


@pytest.fixture
def board(tmp_path: Path) -> CancelBoard:
    return CancelBoard(tmp_path / "board")


@pytest.fixture
def desk(board: CancelBoard) -> Iterator[CancelDesk]:
    desk = CancelDesk(board)
    yield desk
    desk.stop()


class Answers:
    """Collects what a desk answers."""

    def __init__(self) -> None:
        self.got: list[bool] = []
        self._changed = threading.Condition()

    def __call__(self, cancelled: bool) -> None:
        with self._changed:
            self.got.append(cancelled)
            self._changed.notify()

    def wait(self, number: int = 1) -> list[bool]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= number, timeout=5)
        return self.got


def age(board: CancelBoard, seconds: float) -> None:
    for file in board.folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("request_id", ["7", "../../etc/passwd", "a/b\n", "\udcff raw bytes", "ü" * 1000])
def test_what_is_posted_is_seen_under_any_id(board: CancelBoard, request_id: str) -> None:
    board.post(request_id)
    assert board.is_posted(request_id)
    assert not board.is_posted(request_id + "x")
    (name,) = board.posted_files()
    assert board.posted_id(name) == request_id
    assert len(list(board.folder.iterdir())) == 1


def test_another_process_sees_it(board: CancelBoard) -> None:
    board.post("7")
    code = (
        "import sys; from pathlib import Path; from kimi_triton.cancel_board import CancelBoard;"
        "print(CancelBoard(Path(sys.argv[1])).is_posted('7'), 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(board.folder)], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("was_running", [True, False])
def test_the_poster_learns_once_what_became_of_it(board: CancelBoard, was_running: bool) -> None:
    board.post("7")
    assert board.outcome("7") is None
    board.settle("7", was_running)
    assert not board.is_posted("7")
    assert board.outcome("7") is was_running
    assert board.outcome("7") is None
    assert not list(board.folder.iterdir())


def test_settling_what_another_step_has_settled_is_harmless(board: CancelBoard) -> None:
    board.post("7")
    board.settle("7", was_running=True)
    board.settle("7", was_running=False)
    assert board.outcome("7") is True


def test_a_cancellation_is_forgotten_after_a_minute(board: CancelBoard) -> None:
    board.post("7")
    age(board, cancel_board.REMEMBERED_S + 1)
    assert not board.is_posted("7")


def test_f4_old_and_surplus_files_are_removed(board: CancelBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_board, "MAX_FILES", 100)
    for index in range(150):
        board.post(f"old {index}")
        board.settle(f"old {index}", was_running=bool(index % 2))
    age(board, cancel_board.REMEMBERED_S + 1)
    for index in range(1000):
        board.post(str(index))
    assert len(list(board.folder.iterdir())) <= 100 + cancel_board.POSTS_BETWEEN_SWEEPS
    assert board.is_posted("999")


def test_steps_of_one_repository_share_a_board_and_others_do_not(tmp_path: Path) -> None:
    boards = [CancelBoard.of_repository(tmp_path / name) for name in ("a", "a/../a", "b")]
    try:
        boards[0].post("7")
        assert [board.is_posted("7") for board in boards] == [True, True, False]
    finally:
        for board in boards:
            board.remove()
    assert not any(board.folder.exists() for board in boards)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CancelBoard(tmp_path / "mine").folder.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        CancelBoard(tmp_path / "mine")


def test_the_desk_answers_as_soon_as_a_step_has_met_the_request(board: CancelBoard, desk: CancelDesk) -> None:
    answers = Answers()
    start = time.monotonic()
    desk.submit(b"7", answers)
    assert board.is_posted("7")
    board.settle("7", was_running=True)
    assert answers.wait() == [True]
    assert time.monotonic() - start < ANSWER_WITHIN_S


def test_the_desk_gives_up_waiting_but_not_cancelling(board: CancelBoard, desk: CancelDesk) -> None:
    answers = Answers()
    desk.submit(b"unknown", answers)
    assert answers.wait() == [False]
    assert board.is_posted("unknown")


def test_g4_200_cancellations_at_once_are_posted_at_once(board: CancelBoard, desk: CancelDesk) -> None:
    answers = Answers()
    for index in range(200):
        desk.submit(str(index).encode(), answers)
    assert len(board.posted_files()) == 200
    for index in range(0, 200, 2):
        board.settle(str(index), was_running=True)
    assert sum(answers.wait(200)) == 100


def test_one_answer_that_fails_does_not_stop_the_others(desk: CancelDesk, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_cancelled: bool) -> None:
        raise RuntimeError("the caller of the cancellation has gone")

    answers = Answers()
    desk.submit(b"1", fail)
    desk.submit(b"2", answers)
    assert answers.wait() == [False]
    assert "whoever cancelled request 1" in caplog.text


def test_a_missing_id_is_refused(desk: CancelDesk, board: CancelBoard) -> None:
    answers: Callable[[bool], None] = Answers()
    with pytest.raises(InvalidRequest, match="request_id is empty"):
        desk.submit(b"", answers)
    assert not board.posted_files()


def test_a_desk_that_stops_answers_everybody(board: CancelBoard) -> None:
    answers = Answers()
    desk = CancelDesk(board)
    for index in range(20):
        desk.submit(str(index).encode(), answers)
    desk.stop()
    assert answers.got == [False] * 20
