# SPDX-License-Identifier: Apache-2.0
"""Write a model repository for one checkpoint and machine from the files in `model_repository/`."""

from __future__ import annotations

import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from kimi_triton.config import CheckpointConfig
from kimi_triton.errors import ConfigError
from kimi_triton.serve.language import choose_engine
from kimi_triton.serve.options import ServeOptions
from kimi_triton.serve.placement import place_vision
from kimi_triton.serve.wiring import check_wiring

CONFIG_FILE = "config.pbtxt"
OLDEST_SERVER = (2, 51)
FIRST_WITH_INFLIGHT_LIMIT = (2, 65)  # between the steps of an ensemble; older ones cannot parse the field


def template_folder() -> Path:
    """The repository that ships with the package: inside the wheel, or at the top of a source checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "model_repository", package.parents[1] / "model_repository"):
        if (folder / "kimi_vl" / CONFIG_FILE).is_file():
            return folder
    raise ConfigError(f"the package at {package} lacks its model_repository folder; install it again")


def read_repository(folder: Path) -> dict[str, model_config_pb2.ModelConfig]:
    """Parsed config.pbtxt of every model in `folder`."""
    configs = {}
    for file in sorted(folder.glob(f"*/{CONFIG_FILE}")):
        try:
            configs[file.parent.name] = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
        except text_format.ParseError as exc:
            raise ConfigError(f"{file}: {exc}") from exc
    return configs


def write_repository(
    folder: Path,
    options: ServeOptions,
    config: CheckpointConfig,
    *,
    grpc_port: int,
    metrics_port: int,
    server_version: tuple[int, int] = OLDEST_SERVER,
) -> Path:
    """Write a ready repository into `folder`, which plain `tritonserver --model-repository` can serve too.

    Fields that a server of `server_version` would not know are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = template_folder()
    models = read_repository(source)
    _fill(models, options, config)
    host = _loopback(options.host)
    _set(models["kimi_vl_unary"], grpc_url=f"{host}:{grpc_port}")
    _set(models["preprocess"], metrics_url=f"{host}:{metrics_port}")
    for name in ("preprocess", "kimi_vl_unary"):
        _set(models[name], max_llm_requests=options.llm_max_requests)
    check_wiring(models)
    for name, model in models.items():
        shutil.copytree(
            source / name, folder / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", CONFIG_FILE)
        )
        (folder / name / "1").mkdir(exist_ok=True)
        (folder / name / CONFIG_FILE).write_text(_text(model, options, server_version))
    return folder


def _text(model: model_config_pb2.ModelConfig, options: ServeOptions, server_version: tuple[int, int]) -> str:
    text: str = text_format.MessageToString(model)
    if model.platform == "ensemble" and server_version >= FIRST_WITH_INFLIGHT_LIMIT:
        limit = f"ensemble_scheduling {{\n  max_inflight_requests: {options.max_waiting}\n"
        text = text.replace("ensemble_scheduling {\n", limit, 1)
    return text


def _fill(models: dict[str, model_config_pb2.ModelConfig], options: ServeOptions, config: CheckpointConfig) -> None:
    checkpoint = str(options.checkpoint.resolve())
    for name in ("preprocess", "moonvit", "llm"):
        _set(models[name], checkpoint=checkpoint)
    for name in ("moonvit", "llm"):
        _set(models[name], dtype=options.dtype)
    _set(models["preprocess"], max_images=options.max_images)
    _set(models["moonvit"], max_patches_per_forward=options.max_patches_per_forward)
    choose_engine(models["llm"], options)
    place_vision(models["moonvit"], options, config.vision)
    _set(
        models["preprocess"],
        max_waiting=options.max_waiting,
        max_pixel_bytes=options.max_pixel_bytes,
        instances=options.preprocess_instances,
        image_url_hosts=options.image_url_hosts,
        image_url_http=int(options.image_url_http),
    )
    models["preprocess"].instance_group[0].count = options.preprocess_instances
    for name, tensor in (("moonvit", models["moonvit"].output[0]), ("kimi_vision", models["kimi_vision"].output[0])):
        if tensor.name != "image_embeds":
            raise ConfigError(f"{name}: the first output is {tensor.name}, expected image_embeds")
        tensor.dims[-1] = config.text_hidden_size
    models["llm"].input[3].dims[-1] = config.text_hidden_size


def _set(model: model_config_pb2.ModelConfig, **parameters: object) -> None:
    for name, value in parameters.items():
        model.parameters[name].string_value = str(value)


def _loopback(host: str) -> str:
    """A server that listens on all addresses is reached by its own steps over loopback."""
    return "127.0.0.1" if host == "0.0.0.0" else host
