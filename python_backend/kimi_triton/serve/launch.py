# SPDX-License-Identifier: Apache-2.0
"""From options to a ready server: check the checkpoint, write the repository, start, wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kimi_triton.answer_line import AnswerLine
from kimi_triton.cancel_board import CancelBoard
from kimi_triton.checkpoint import Checkpoint
from kimi_triton.pixel_budget import PixelBudget
from kimi_triton.preprocess.fetch import UrlRules
from kimi_triton.preprocess.pipeline import Preprocessor
from kimi_triton.serve.installation import find_server
from kimi_triton.serve.options import ServeOptions
from kimi_triton.serve.ports import Ports, PortTaken
from kimi_triton.serve.repository import write_repository
from kimi_triton.serve.server import TritonServer

PORT_ATTEMPTS = 3


@contextmanager
def launch(
    options: ServeOptions,
    run_folder: Path,
    on_progress: Callable[[str, float], None] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[TritonServer]:
    """A ready server for the time of the `with` block, stopped in order afterwards.

    Everything that can be wrong with the checkpoint or the machine raises ConfigError before a port opens.
    When `is_stopped` turns true during the start, the server is handed over without being ready.
    """
    checkpoint = Checkpoint(options.checkpoint)
    UrlRules.parse(options.image_url_hosts, options.image_url_http)
    Preprocessor.from_checkpoint(options.checkpoint, max_images=options.max_images)  # tokenizer and processor files
    installation = find_server(run_folder)
    repository = options.model_repository or run_folder / "repository"
    log_file = options.log_file or run_folder / "server.log"

    def start() -> TritonServer:
        ports = Ports.choose(options.host, options.http_port, options.grpc_port, options.metrics_port)
        write_repository(
            repository,
            options,
            checkpoint.config,
            grpc_port=ports.grpc,
            metrics_port=ports.metrics,
            server_version=installation.version,
        )
        server = TritonServer(installation, repository, options.host, ports, log_file)
        try:
            server.wait_ready(options.start_timeout_s, on_progress, is_stopped)
        except BaseException:
            server.stop()
            raise
        return server

    try:
        with _retried(start) as server:
            yield server
    finally:
        CancelBoard.of_repository(repository).remove()
        PixelBudget.of_repository(repository, options.max_pixel_bytes).remove()
        AnswerLine.of_repository(repository, options.llm_max_requests).remove()


def _retried(start: Callable[[], TritonServer]) -> TritonServer:
    """Start again, which chooses other ports, when one was taken meanwhile.

    Ports that the user named are refused by the choice itself then.
    """
    for _ in range(PORT_ATTEMPTS - 1):
        with suppress(PortTaken):
            return start()
    return start()
