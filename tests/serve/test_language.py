# SPDX-License-Identifier: Apache-2.0
"""The options of `serve` that choose the language model's engine, as they reach the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.serve.cli import main
from kimi_triton.serve.options import ServeOptions
from kimi_triton.serve.repository import read_repository, write_repository


def written(checkpoint: Path, folder: Path, **options: Any) -> dict[str, str]:
    """Parameters of `llm` in a repository for these options."""
    serve_options = ServeOptions(checkpoint=checkpoint, **options)
    models = read_repository(
        write_repository(folder, serve_options, Checkpoint(checkpoint).config, grpc_port=1, metrics_port=2)
    )
    return {name: value.string_value for name, value in models["llm"].parameters.items()}


def test_this_process_is_the_default(tiny_k25: Path, tmp_path: Path) -> None:
    parameters = written(tiny_k25, tmp_path)
    assert (parameters["engine"], parameters["vllm_urls"]) == ("transformers", "")
    assert (parameters["max_running"], parameters["max_waiting"]) == ("16", "256")


def test_several_servers_may_be_named(tiny_k25: Path, tmp_path: Path) -> None:
    urls = ["http://a:8100/,http://b:8100", "http://c:8100/v1"]
    parameters = written(
        tiny_k25, tmp_path, llm="vllm", llm_url=urls, llm_timeout_s=9, llm_chunk_ms=5, llm_max_waiting=7
    )
    assert parameters["engine"] == "vllm"
    assert parameters["vllm_urls"] == "http://a:8100,http://b:8100,http://c:8100"
    assert (parameters["vllm_timeout_s"], parameters["vllm_chunk_ms"], parameters["max_waiting"]) == ("9", "5", "7")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"llm": "vllm"}, "no vLLM server is given"),
        ({"llm": "vllm", "llm_url": ["localhost:8100"]}, "'localhost:8100' is no URL"),
        ({"llm_url": ["http://a:1"]}, "say --llm vllm"),
        ({"llm_max_running": 0}, "--llm-max-running is 0"),
        ({"llm_max_waiting": -1}, "--llm-max-waiting -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str, tiny_k25: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        written(tiny_k25, tmp_path, **options)


def test_the_command_line_takes_urls_in_every_way(tiny_k25: Path, tmp_path: Path) -> None:
    arguments = ["--llm", "vllm", "--llm-url", "http://a:1", "http://b:1", "--llm-url", "http://c:1,http://d:1"]
    assert main(["write-repository", str(tmp_path), "--checkpoint", str(tiny_k25), *arguments]) == 0
    urls = read_repository(tmp_path)["llm"].parameters["vllm_urls"].string_value
    assert urls.split(",") == ["http://a:1", "http://b:1", "http://c:1", "http://d:1"]
