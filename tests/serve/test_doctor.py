# SPDX-License-Identifier: Apache-2.0
"""Each check of the doctor can fail, and then says what to do."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_triton.errors import ConfigError
from kimi_triton.serve import doctor, installation, memory
from kimi_triton.serve.cli import main
from kimi_triton.serve.doctor import CHECKS, as_text, examine
from kimi_triton.serve.memory import check_shm, shm_need
from kimi_triton.serve.options import ServeOptions

FREE = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}


def failed(checkpoint: Path, **values: Any) -> dict[str, str]:
    results = examine(ServeOptions(checkpoint=checkpoint, **FREE | values))
    assert [result.check for result in results] == list(CHECKS)
    return {result.check: result.detail for result in results if not result.passed}


def test_nothing_fails_on_this_machine(tiny_k25: Path, tiny_vl: Path) -> None:
    assert failed(tiny_k25) == {}
    assert failed(tiny_vl, preprocess_instances=1, vision_instances=2) == {}


def test_a_missing_shard_and_a_broken_tokenizer_are_named(tiny_k25: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_k25, folder)
    shard = next(folder.glob("*.safetensors"))
    shard.unlink()
    (folder / "tiktoken.model").write_text("no ranks\n")
    found = failed(folder)
    assert shard.name in found["checkpoint"]
    assert "tiktoken.model" in found["tokenizer and image settings"]
    assert "shared memory" not in found


def test_options_that_do_not_fit_fail_in_the_dry_run(tiny_k25: Path) -> None:
    found = failed(tiny_k25, vision_parallel="tensor", vision_workers=3)
    assert "3" in found["model repository"]


def test_a_gpu_that_is_not_there_is_named(tiny_k25: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: {0})
    found = failed(tiny_k25, vision_devices="0,1")
    assert found.keys() == {"GPUs"}
    assert "GPU 1" in found["GPUs"]
    assert failed(tiny_k25, vision_devices="0") == {}


def test_a_taken_port_is_named(tiny_k25: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in failed(tiny_k25, grpc_port=port)["ports"]


def test_a_silent_vllm_server_is_named(tiny_k25: Path) -> None:
    found = failed(tiny_k25, llm="vllm", llm_url=["http://127.0.0.1:1"])
    assert "http://127.0.0.1:1" in found["vLLM"]


def test_numpy_2_fails_for_an_old_stub(tiny_k25: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "distribution_version", lambda _: "2.1.0")
    assert "numpy<2" in failed(tiny_k25)["server"]


def test_another_python_fails(tiny_k25: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, 13, 0))
    assert "3.10, 3.11 or 3.12" in failed(tiny_k25)["python"]


def test_a_checkpoint_larger_than_memory_points_to_vllm(tiny_k25: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 1000)
    assert "--llm vllm" in failed(tiny_k25)["memory"]


def test_g6_shared_memory_need_grows_with_what_is_configured() -> None:
    config: Any = SimpleNamespace(text_hidden_size=7168, vision=SimpleNamespace(num_attention_heads=16))
    checkpoint = Path()
    small = ServeOptions(checkpoint=checkpoint, max_pixel_bytes=588 * 4000, preprocess_instances=1)
    # 4000 patches are 2,352,000 bytes in two processes, and 1000 rows of 7168 bfloat16 in two
    assert shm_need(small, config) - memory.SLACK_BYTES == 2 * 588 * 4000 + 2 * 1000 * 7168 * 2
    more = ServeOptions(checkpoint=checkpoint, max_pixel_bytes=588 * 4000, preprocess_instances=3)
    assert shm_need(more, config) - shm_need(small, config) == 2 * 588 * 4000


def test_g6_a_64_mib_container_is_told_its_shm_size(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(text_hidden_size=7168, vision=SimpleNamespace(num_attention_heads=16))
    monkeypatch.setattr(memory.os, "statvfs", lambda _: SimpleNamespace(f_bavail=16384, f_frsize=4096))
    with pytest.raises(ConfigError, match=r"has 64 MiB free.*--shm-size=\d+m.*--max-pixel-bytes \d+"):
        check_shm(ServeOptions(checkpoint=Path()), config)


def test_the_command_prints_json_and_fails_when_a_check_does(
    tiny_k25: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = ["--grpc-port", "0", "--metrics-port", "0", "--http-port", "0"]
    assert main(["doctor", "--checkpoint", str(tiny_k25), "--json", *ports]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert main(["doctor", "--checkpoint", str(tmp_path / "none"), *ports]) == 1
    assert "FAIL checkpoint" in capsys.readouterr().out


def test_failures_stand_out_in_the_text() -> None:
    text = as_text([doctor.Result("a", True, "fine"), doctor.Result("b", False, "do this")])
    assert text.splitlines() == ["ok   a: fine", "FAIL b: do this"]
