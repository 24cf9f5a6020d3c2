# SPDX-License-Identifier: Apache-2.0
"""The written model repository: wiring, values, and the shims beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.serve.options import ServeOptions
from kimi_triton.serve.repository import read_repository, template_folder, write_repository
from kimi_triton.serve.wiring import check_wiring

PYTHON_MODELS = sorted(file.parents[1].name for file in template_folder().glob("*/1/model.py"))


@pytest.fixture
def models() -> dict[str, Any]:
    return read_repository(template_folder())


def source(model: str) -> str:
    return (template_folder() / model / "1" / "model.py").read_text()


def test_the_repository_has_the_models_of_the_design(models: dict[str, Any]) -> None:
    assert set(models) == {
        *("kimi_vl", "kimi_vision", "kimi_vl_unary", "kimi_cancel"),
        *("preprocess", "moonvit", "llm"),
    }
    assert PYTHON_MODELS == ["kimi_cancel", "kimi_vl_unary", "llm", "moonvit", "preprocess"]
    assert all(models[name].name == name for name in models)


def test_the_shipped_files_fit_together(models: dict[str, Any]) -> None:
    check_wiring(models)


@pytest.mark.parametrize("model", PYTHON_MODELS)
def test_every_tensor_of_a_config_is_named_in_its_shim(model: str, models: dict[str, Any]) -> None:
    """Names are written literally in the shim, or come from the one tuple of outputs that llm shares with unary."""
    literals = {node.value for node in ast.walk(ast.parse(source(model))) if isinstance(node, ast.Constant)}
    literals |= {node.arg for node in ast.walk(ast.parse(source(model))) if isinstance(node, ast.keyword)}
    inputs = {tensor.name for tensor in models[model].input}
    outputs = {tensor.name for tensor in models[model].output}
    assert inputs - {"received_s"} <= literals  # triton_io reads it, alike for every step
    if model != "kimi_vl_unary":  # it hands on whatever kimi_vl answers
        assert outputs <= literals


@pytest.mark.parametrize("model", PYTHON_MODELS)
def test_shims_stay_small_and_leave_triton_to_one_module(model: str) -> None:
    assert len(source(model).splitlines()) <= 60
    assert "triton_python_backend_utils" not in source(model)


def test_only_one_module_imports_the_triton_backend() -> None:
    package = Path(__file__).parents[2] / "python_backend" / "kimi_triton"
    importers = [file.name for file in package.rglob("*.py") if re.search(r"import triton_python", file.read_text())]
    assert importers == ["triton_io.py"]


def test_unary_and_streaming_models_have_one_interface(models: dict[str, Any]) -> None:
    assert list(models["kimi_vl"].input) == list(models["kimi_vl_unary"].input) == list(models["preprocess"].input)
    assert list(models["kimi_vl"].output) == list(models["kimi_vl_unary"].output) == list(models["llm"].output)


def test_values_of_the_checkpoint_and_options_are_written(tiny_k25: Path, tmp_path: Path) -> None:
    options = ServeOptions(checkpoint=tiny_k25, dtype="float32", max_images=3, preprocess_instances=1)
    written = read_repository(
        write_repository(
            tmp_path / "repository", options, Checkpoint(tiny_k25).config, grpc_port=7001, metrics_port=7002
        )
    )
    check_wiring(written)
    for name in ("preprocess", "moonvit", "llm"):
        assert written[name].parameters["checkpoint"].string_value == str(tiny_k25)
    assert written["moonvit"].parameters["dtype"].string_value == "float32"
    assert written["preprocess"].parameters["max_images"].string_value == "3"
    assert written["preprocess"].instance_group[0].count == 1
    assert written["kimi_vl_unary"].parameters["grpc_url"].string_value == "127.0.0.1:7001"
    assert list(written["kimi_vision"].output[0].dims) == [1, -1, 128]


def test_a_repository_can_be_written_over_an_older_one(tiny_k25: Path, tmp_path: Path) -> None:
    config = Checkpoint(tiny_k25).config
    for dtype in ("float32", "bfloat16"):
        options = ServeOptions(checkpoint=tiny_k25, dtype=dtype)  # type: ignore[arg-type]
        folder = write_repository(tmp_path, options, config, grpc_port=1, metrics_port=2)
    assert read_repository(folder)["llm"].parameters["dtype"].string_value == "bfloat16"


def remove_step_input(models: dict[str, Any]) -> None:
    del models["kimi_vl"].ensemble_scheduling.step[2].input_map["image_embeds"]


def rename_output(models: dict[str, Any]) -> None:
    models["moonvit"].output[0].name = "embeddings"


def change_type(models: dict[str, Any]) -> None:
    models["moonvit"].output[0].data_type = model_config_pb2.TYPE_FP32


def change_dimensions(models: dict[str, Any]) -> None:
    models["preprocess"].output[0].dims[2] = 1


def remove_model(models: dict[str, Any]) -> None:
    del models["llm"]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove_step_input, "step llm gets nothing for its input image_embeds"),
        (rename_output, "step moonvit has no output image_embeds"),
        (change_type, "image_embeds: data type 11 is produced, 14 is expected"),
        (change_dimensions, "step moonvit, input pixel_values: dimensions"),
        (remove_model, "step llm is not in the repository"),
    ],
)
def test_each_kind_of_wrong_wiring_is_named(damage: Any, named: str, models: dict[str, Any]) -> None:
    damage(models)
    with pytest.raises(ConfigError, match=named):
        check_wiring(models)


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.pbtxt").write_text('name: "llm"\nno_such_field: 1\n')
    with pytest.raises(ConfigError, match=r"config\.pbtxt.*no_such_field"):
        read_repository(tmp_path)


@pytest.mark.parametrize(
    ("version", "is_limited"), [((2, 51), False), ((2, 64), False), ((2, 65), True), ((3, 0), True)]
)
def test_newer_fields_are_written_only_for_servers_that_know_them(
    version: tuple[int, int], is_limited: bool, tiny_k25: Path, tmp_path: Path
) -> None:
    options = ServeOptions(checkpoint=tiny_k25, max_waiting=9)
    config = Checkpoint(tiny_k25).config
    write_repository(tmp_path, options, config, grpc_port=1, metrics_port=2, server_version=version)
    limited = [
        file.parent.name for file in tmp_path.glob("*/config.pbtxt") if "max_inflight_requests: 9" in file.read_text()
    ]
    assert sorted(limited) == (["kimi_vision", "kimi_vl"] if is_limited else [])
