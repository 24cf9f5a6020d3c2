# SPDX-License-Identifier: Apache-2.0
"""The printed commands: complete, consistent, and refused where they could not run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kimi_triton.errors import ConfigError
from kimi_triton.llm.vllm_command import VllmCommand
from kimi_triton.serve.cli import main


def options(line: str) -> dict[str, str]:
    """--name value pairs of a command; switches have an empty value."""
    words = shlex.split(line)[3:]
    return {
        word: "" if following.startswith("--") else following
        for word, following in zip(words, [*words[1:], "--"], strict=True)
        if word.startswith("--")
    }


def test_one_gpu(tiny_k25: Path) -> None:
    (line,) = VllmCommand(checkpoint=tiny_k25).lines()
    assert shlex.split(line)[:3] == ["vllm", "serve", str(tiny_k25)]
    assert options(line) == {
        "--enable-prompt-embeds": "",
        "--skip-tokenizer-init": "",
        "--language-model-only": "",
        "--generation-config": "vllm",
        "--max-model-len": "16384",
        "--host": "0.0.0.0",
        "--port": "8100",
    }


def test_nodes_differ_by_rank_and_only_the_first_one_listens(tiny_k25: Path) -> None:
    lines = VllmCommand(
        checkpoint=tiny_k25, tensor_parallel_size=4, pipeline_parallel_size=2, nodes=2, master_addr="10.0.0.1"
    ).lines()
    first, second = map(options, lines)
    for node in (first, second):
        assert node["--tensor-parallel-size"] == "4"
        assert node["--pipeline-parallel-size"] == "2"
        assert (node["--nnodes"], node["--master-addr"]) == ("2", "10.0.0.1")
    assert (first["--node-rank"], second["--node-rank"]) == ("0", "1")
    assert "--port" in first
    assert "--headless" in second
    assert "--headless" not in first


def test_a_folder_with_a_space_is_quoted(tiny_k25: Path, tmp_path: Path) -> None:
    (tmp_path / "my model").symlink_to(tiny_k25)
    folder = tmp_path / "my model 2"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_k25 / "config.json").read_text())
    (line,) = VllmCommand(checkpoint=folder).lines()
    assert shlex.split(line)[2] == str(folder)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_parallel_size": 3}, "3, the model has 4 heads"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0"),
        ({"pipeline_parallel_size": 9}, "9, the model has 3 layers"),
        ({"nodes": 2}, "1 GPUs .* evenly over 2 nodes"),
        ({"nodes": 2, "tensor_parallel_size": 4}, "--master-addr"),
        ({"max_model_len": 10**6}, "the checkpoint allows 16384"),
    ],
)
def test_sizes_that_cannot_run_are_refused(sizes: dict[str, int], message: str, tiny_k25: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmCommand(checkpoint=tiny_k25, **sizes).lines()  # type: ignore[arg-type]


def test_the_command_prints_one_line_for_each_node(tiny_k25: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tensor-parallel-size", "2", "--nodes", "2", "--master-addr", "a", "--max-model-len", "512"]
    assert main(["llm-command", "--checkpoint", str(tiny_k25), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [options(line)["--node-rank"] for line in lines] == ["0", "1"]
    assert main(["llm-command", "--checkpoint", str(tiny_k25), "--tensor-parallel-size", "3"]) == 1
    assert "the model has 4 heads" in capsys.readouterr().err
