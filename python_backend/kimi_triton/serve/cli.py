# SPDX-License-Identifier: Apache-2.0
"""The `kimi-triton` command."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from types import FrameType

from kimi_triton import __version__
from kimi_triton.checkpoint import Checkpoint
from kimi_triton.demo import CHECKPOINT
from kimi_triton.errors import ConfigError
from kimi_triton.llm.vllm_command import VllmCommand
from kimi_triton.serve.doctor import as_json as doctor_json
from kimi_triton.serve.doctor import as_text as doctor_text
from kimi_triton.serve.doctor import examine
from kimi_triton.serve.health import HealthPage, check_health, is_usable
from kimi_triton.serve.launch import launch
from kimi_triton.serve.memory import check_shm
from kimi_triton.serve.options import DTYPES, LLMS, ServeOptions
from kimi_triton.serve.repository import write_repository
from kimi_triton.serve.server import TritonServer
from kimi_triton.serve.start_times import FirstProgress, explain_start, process_age_s
from kimi_triton.serve.watch import Watcher
from kimi_triton.vision.layout import PARALLEL

LOOK_EVERY_S = 0.25


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 refused with one sentence, 130 interrupted)."""
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    try:
        return int(command(**options))
    except ConfigError as exc:
        print(f"kimi-triton: {exc}", file=sys.stderr)
        return 1


def serve(**values: object) -> int:
    """Serve until SIGINT or SIGTERM; whatever dies meanwhile is replaced."""
    imports_s = process_age_s(os.getpid())
    options = ServeOptions(**values)  # type: ignore[arg-type]
    stopping, progress = _StopSignal(), FirstProgress(_show_progress)
    with (
        tempfile.TemporaryDirectory(prefix="kimi-triton-") as run_folder,
        launch(options, Path(run_folder), progress, stopping.is_set) as server,
    ):
        if stopping.is_set():
            return 130
        if options.verbose:
            log = server.log_file.read_text(errors="replace")
            ages = process_age_s(os.getpid()), process_age_s(server.process.pid)
            print(explain_start(imports_s, *ages, log, progress.seconds), file=sys.stderr, flush=True)
        _warn_of_little_memory(options)
        watcher = Watcher(server, _note)
        with closing(HealthPage(options.host, options.health_port, watcher.health)) as page, closing(watcher):
            print(_endpoints(server, page.url), flush=True)
            while not stopping.is_set():
                watcher.look()
                time.sleep(LOOK_EVERY_S)
        print("kimi-triton: stopping", flush=True)
    return 0


def health(host: str, http_port: int, timeout_s: float) -> int:
    """Ask every stage of a running server for a tiny answer; exit code 0 when all of them give one."""
    state = check_health(f"{host}:{http_port}", timeout_s)
    print(json.dumps(state, indent=2))
    return 0 if is_usable(state) else 1


def doctor(json: bool, **values: object) -> int:
    """Look at everything that could fail; exit code 0 when nothing would."""
    results = examine(ServeOptions(**values))  # type: ignore[arg-type]
    print(doctor_json(results) if json else doctor_text(results))
    return 0 if all(result.passed for result in results) else 1


def write(model_repository: Path, checkpoint: Path, **values: object) -> int:
    """Write the repository only, for `tritonserver --model-repository`."""
    options = ServeOptions(checkpoint=checkpoint, **values)  # type: ignore[arg-type]
    config = Checkpoint(checkpoint).config
    write_repository(model_repository, options, config, grpc_port=options.grpc_port, metrics_port=options.metrics_port)
    print(f"wrote {model_repository}")
    return 0


def llm_command(**values: object) -> int:
    """Print how to start vLLM, one line for each machine."""
    print("\n".join(VllmCommand(**values).lines()))  # type: ignore[arg-type]
    return 0


class _StopSignal:
    """Turns SIGINT and SIGTERM into a flag, so that the server is stopped in order."""

    def __init__(self) -> None:
        self._set = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


def _show_progress(step: str, share: float) -> None:
    end = "\n" if share >= 1 else "\r"
    bar = "#" * round(20 * share)
    print(f"loading {step:<8} [{bar:<20}] {share:4.0%}", end=end, file=sys.stderr, flush=True)


def _warn_of_little_memory(options: ServeOptions) -> None:
    try:
        check_shm(options, Checkpoint(options.checkpoint).config)
    except ConfigError as exc:
        _note(f"warning: {exc}")


def _note(line: str) -> None:
    print(f"kimi-triton: {line}", file=sys.stderr, flush=True)


def _endpoints(server: TritonServer, health_url: str) -> str:
    http = server.http_url
    body = '{"text_input": "What can you do?", "max_tokens": 32}'
    return (
        f"ready\n  HTTP     http://{http}\n  gRPC     {server.grpc_url}\n"
        f"  metrics  http://{server.metrics_url}/metrics\n  health   http://{health_url}/ready\n"
        f"ask it:\n  curl -s http://{http}/v2/models/kimi_vl/generate -d '{body}'"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kimi-triton", description="Kimi-VL and Kimi-K2.5 on Triton.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serving = commands.add_parser("serve", help="serve a checkpoint", formatter_class=_HELP)
    serving.set_defaults(command=serve)
    _add_options(serving)
    serving.add_argument("--model-repository", type=Path, help="keep the written repository in this folder")
    for name in ("http_port", "health_port"):
        _add(serving, name, type=int, help="0: the system chooses")
    _add(serving, "start_timeout_s", type=float, help="seconds until every model must be ready")
    serving.add_argument("--log-file", type=Path, help="where the server's own log goes")
    serving.add_argument("--verbose", action="store_true", help="print where the time of the start goes")

    examining = commands.add_parser("doctor", help="find out what would fail", formatter_class=_HELP)
    examining.set_defaults(command=doctor)
    _add_options(examining)
    _add(examining, "http_port", type=int, help="0: the system chooses")
    examining.add_argument("--json", action="store_true", help="for programs")

    asking = commands.add_parser("health", help="ask every stage of a running server", formatter_class=_HELP)
    asking.set_defaults(command=health)
    _add(asking, "host", help="of the server")
    _add(asking, "http_port", type=int, help="of the server")
    asking.add_argument("--timeout-s", type=float, default=10.0, help="seconds to wait for an answer")

    writing = commands.add_parser("write-repository", help="write a model repository", formatter_class=_HELP)
    writing.set_defaults(command=write)
    writing.add_argument("model_repository", type=Path)
    _add_options(writing)

    starting = commands.add_parser("llm-command", help="print how to start vLLM for --llm vllm", formatter_class=_HELP)
    starting.set_defaults(command=llm_command)
    _add_checkpoint(starting)
    sizes = {field.name: field.default for field in fields(VllmCommand) if field.name != "checkpoint"}
    for name, default in sizes.items():
        starting.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=_SIZES[name])
    return parser


_SIZES = {
    "tensor_parallel_size": "GPUs that share each layer",
    "pipeline_parallel_size": "groups of GPUs that share the layers",
    "nodes": "machines of one server",
    "master_addr": "address of the first machine, for the others",
    "max_model_len": "tokens of prompt and answer; 0: what the checkpoint allows",
    "host": "address that the first machine listens on",
    "port": "port that the first machine listens on",
}


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    text = "folder of a Kimi-VL or Kimi-K2.5/K2.6 release; left out: the small demo model"
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help=text)


def _add_options(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    _add(parser, "host", help="address to listen on")
    for name in ("grpc_port", "metrics_port"):
        _add(parser, name, type=int, help="0: the system chooses")
    _add(parser, "dtype", choices=DTYPES, help="of the weights; auto: as stored")
    _add(parser, "max_images", type=int, help="images of one request")
    _add(parser, "max_patches_per_forward", type=int, help="patches of one pass through the vision tower")
    _add(parser, "vision_parallel", choices=PARALLEL, help="how the vision tower is spread over processes")
    _add(parser, "vision_devices", help="GPUs of the vision tower: 0,1 or, as two groups, 0,1;2,3; empty: the CPU")
    _add(parser, "vision_instances", type=int, help="Triton instances of the vision tower on the CPU; 0: one")
    _add(parser, "vision_workers", type=int, help="processes of a data or tensor group on the CPU; 0: two")
    _add(parser, "vision_threads", type=int, help="CPU threads of each vision process; 0: the cores shared out")
    switch = argparse.BooleanOptionalAction
    _add(parser, "vision_graphs", action=switch, help="replay small packs as CUDA graphs; never with `tensor`")
    _add(parser, "vision_compile", action=switch, help="compile the vision tower with torch.compile, on GPUs only")
    _add(parser, "vision_stall_timeout_s", type=int, help="seconds without progress until workers are replaced")
    _add(parser, "image_cache_bytes", type=int, help="encoded images that each vision instance remembers; 0: none")
    _add(parser, "llm", choices=LLMS, help="what runs the language model: this server, or vLLM servers")
    _add(
        parser,
        "llm_url",
        action="extend",
        nargs="+",
        metavar="URL",
        help="vLLM servers of this checkpoint: http://host:8000 ...",
    )
    _add(parser, "llm_timeout_s", type=int, help="seconds of silence until a vLLM server is taken for dead")
    _add(parser, "llm_chunk_ms", type=int, help="tokens that come from vLLM faster than this are streamed together")
    _add(parser, "llm_max_running", type=int, help="requests that are decoded together")
    _add(parser, "llm_max_waiting", type=int, help="requests that may wait for these; more are refused")
    _add(parser, "preprocess_instances", type=int, help="processes that decode images")
    _add(parser, "max_waiting", type=int, help="requests that may wait for these; more are refused")
    _add(parser, "image_url_hosts", help="fetch pictures from: example.com,*.example.org or *; empty: never")
    _add(parser, "image_url_http", action="store_true", help="fetch by http too, not only by https")
    _add(parser, "max_pixel_bytes", type=int, help="decoded pixels on their way through the vision step")


_HELP = argparse.ArgumentDefaultsHelpFormatter
_DEFAULTS = {field.name: field.default for field in fields(ServeOptions)}


def _add(parser: argparse.ArgumentParser, name: str, **how: object) -> None:
    """An option whose default is the dataclass's, so that the two cannot drift apart."""
    parser.add_argument(f"--{name.replace('_', '-')}", default=_DEFAULTS[name], **how)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
