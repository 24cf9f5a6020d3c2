# SPDX-License-Identifier: Apache-2.0
"""`kimi-triton doctor`: everything that would fail later, looked at before anything is started."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.config import CheckpointConfig
from kimi_triton.errors import ConfigError
from kimi_triton.preprocess.pipeline import Preprocessor
from kimi_triton.serve.installation import find_server
from kimi_triton.serve.memory import check_shm, free_memory
from kimi_triton.serve.options import ServeOptions
from kimi_triton.serve.placement import plan_vision
from kimi_triton.serve.ports import Ports
from kimi_triton.serve.repository import read_repository, write_repository
from kimi_triton.serve.wiring import check_wiring

PYTHON_VERSIONS = ((3, 10), (3, 11), (3, 12))


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found; when it failed, `detail` says what to do."""

    check: str
    passed: bool
    detail: str


def examine(options: ServeOptions) -> list[Result]:
    """Every check, whatever the others found."""
    return [_run(name, check, options) for name, check in CHECKS.items()]


def as_text(results: list[Result]) -> str:
    """A line for each check, failures marked."""
    return "\n".join(f"{'ok  ' if result.passed else 'FAIL'} {result.check}: {result.detail}" for result in results)


def as_json(results: list[Result]) -> str:
    """{"passed": all of them, "checks": [...]}."""
    checks = [asdict(result) for result in results]
    return json.dumps({"passed": all(result.passed for result in results), "checks": checks}, indent=2)


def _run(name: str, check: Callable[[ServeOptions], str], options: ServeOptions) -> Result:
    try:
        return Result(name, True, check(options))
    except ConfigError as exc:
        return Result(name, False, str(exc))


def check_python(_: ServeOptions) -> str:
    if sys.version_info[:2] not in PYTHON_VERSIONS:
        raise ConfigError(f"Python {platform.python_version()} runs here; use 3.10, 3.11 or 3.12")
    return f"Python {platform.python_version()}"


def check_server(_: ServeOptions) -> str:
    """The server, a stub for this Python, its libraries, and NumPy, which an old stub needs below 2."""
    with tempfile.TemporaryDirectory(prefix="kimi-triton-") as folder:
        server = find_server(Path(folder))
    return f"Triton {server.version[0]}.{server.version[1]} at {server.binary}, NumPy {version('numpy')}"


def check_checkpoint(options: ServeOptions) -> str:
    checkpoint = Checkpoint(options.checkpoint)
    return f"{checkpoint.config.family}, {len(checkpoint.tensors)} tensors in complete files"


def check_tokenizer(options: ServeOptions) -> str:
    """The tokenizer's self-check and the image settings."""
    preprocessor = Preprocessor.from_checkpoint(options.checkpoint, max_images=options.max_images)
    limit = preprocessor.settings.in_patch_limit
    return f"{preprocessor.tokenizer.vocab_size} tokens, images of at most {limit} patches before padding"


def check_repository(options: ServeOptions) -> str:
    """A dry run: write the repository, read it back, check that the steps fit together."""
    with tempfile.TemporaryDirectory(prefix="kimi-triton-") as folder:
        write_repository(Path(folder), options, _config(options), grpc_port=1, metrics_port=1)
        models = read_repository(Path(folder))
        check_wiring(models)
    return f"{len(models)} models fit together: {', '.join(models)}"


def check_shared_memory(options: ServeOptions) -> str:
    return check_shm(options, _config(options))


def check_memory(options: ServeOptions) -> str:
    """Weights in host memory, as far as they are loaded there."""
    checkpoint = Checkpoint(options.checkpoint)
    files = {tensor.file for tensor in checkpoint.tensors.values()}
    need = sum(file.stat().st_size for file in files) / 1e9
    free = free_memory() / 1e9
    if options.llm == "vllm":
        return f"the language model of {need:.1f} GB is loaded by vLLM"
    if need > free:
        raise ConfigError(
            f"the checkpoint has {need:.1f} GB and {free:.1f} GB of memory are free; run the language model on vLLM "
            "servers with --llm vllm --llm-url URL"
        )
    return f"the checkpoint has {need:.1f} GB, {free:.1f} GB of memory are free"


def check_gpus(options: ServeOptions) -> str:
    wanted = {device for group in plan_vision(options, _config(options).vision).devices for device in group}
    present = _gpus()
    if wanted - present:
        raise ConfigError(
            f"--vision-devices asks for GPU {', '.join(map(str, sorted(wanted - present)))}, "
            f"nvidia-smi shows {sorted(present) or 'none'}; leave it out to run on the CPU"
        )
    return f"vision on {f'GPU {sorted(wanted)}' if wanted else 'the CPU'}, {len(present)} GPUs are here"


def check_ports(options: ServeOptions) -> str:
    Ports.choose(options.host, options.http_port, options.grpc_port, options.metrics_port)
    return f"{options.host}: {options.http_port}, {options.grpc_port} and {options.metrics_port} are free"


def check_vllm(options: ServeOptions) -> str:
    if options.llm != "vllm":
        return "not asked for"
    urls = options.llm_url or ()
    for url in urls:
        try:
            urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5).close()
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{url}/health: {exc}; `kimi-triton llm-command` prints how to start it") from exc
    return f"{len(urls)} servers answer"


def _config(options: ServeOptions) -> CheckpointConfig:
    return CheckpointConfig.from_checkpoint(options.checkpoint)


def _gpus() -> set[int]:
    """Numbers of the GPUs of this machine, without opening one."""
    if shutil.which("nvidia-smi") is None:
        return set()
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return {int(line) for line in result.stdout.split() if line.isdigit()}


CHECKS: dict[str, Callable[[ServeOptions], str]] = {
    "python": check_python,
    "server": check_server,
    "checkpoint": check_checkpoint,
    "tokenizer and image settings": check_tokenizer,
    "model repository": check_repository,
    "shared memory": check_shared_memory,
    "memory": check_memory,
    "GPUs": check_gpus,
    "ports": check_ports,
    "vLLM": check_vllm,
}
