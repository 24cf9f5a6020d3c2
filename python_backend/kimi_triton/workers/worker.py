# SPDX-License-Identifier: Apache-2.0
"""One worker process: load, announce, serve, exit. Started as `python -m kimi_triton.workers.worker SOCKET_FD`."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import distributed as dist

from kimi_triton.errors import ConfigError, KimiError
from kimi_triton.vision.encoder import LocalEncoder
from kimi_triton.vision.gpu import speed_up
from kimi_triton.vision.local import load_from_folder
from kimi_triton.vision.moonvit import VisionModel
from kimi_triton.workers.exchange import Exchange
from kimi_triton.workers.messages import Advancing, Encode, Encoded, Failed, Progress, Ready, Start, Stop
from kimi_triton.workers.sharding import apply_tensor_parallel

ADVANCING_EVERY_S = 0.5


def main(socket_fd: int) -> None:
    """Live until told to stop or until the other end of the socket is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole process group
    connection: Connection = Connection(socket_fd)
    threading.Thread(target=_end_with_parent, args=(socket_fd,), daemon=True).start()
    try:
        start: Start = connection.recv()
        with _joined_ranks(start):
            _serve(connection, start, _load(start, connection))
        os._exit(0)  # nothing is left to do, and an orderly exit of torch takes its time
    except BaseException as exc:
        traceback.print_exc()
        connection.send(Failed(str(exc) if isinstance(exc, ConfigError) else f"{type(exc).__name__}, see the log"))
        os._exit(1)  # an orderly exit could wait for ranks that are gone


def _end_with_parent(socket_fd: int) -> None:
    """A process whose parent was killed must not stay, not even in a collective that never ends."""
    hangup = select.poll()
    hangup.register(socket_fd, 0)  # reports only that the peer has closed its end
    hangup.poll()
    os._exit(1)


@contextmanager
def _joined_ranks(start: Start) -> Iterator[None]:
    """Membership in the group that shares the weights. All ranks are on one machine and meet over a file."""
    settings = start.settings
    if settings.tp_size == 1:
        yield
        return
    dist.init_process_group(
        "gloo" if settings.visible_device is None else "nccl",
        store=dist.FileStore(f"/proc/self/fd/{start.rendezvous_fd}", settings.tp_size),  # type: ignore[attr-defined]
        rank=settings.tp_rank,
        world_size=settings.tp_size,
        timeout=timedelta(seconds=settings.collective_timeout_s),
    )
    yield
    dist.destroy_process_group()


def _load(start: Start, connection: Connection) -> VisionModel:
    settings = start.settings
    torch.set_num_threads(settings.num_threads)
    model = load_from_folder(
        settings.checkpoint,
        torch.device(settings.device),
        settings.dtype,
        lambda done, total: connection.send(Progress(done, total)),
    )
    if settings.tp_size > 1:
        apply_tensor_parallel(model, settings.tp_rank, settings.tp_size, dist.all_reduce)
    announce = _announcer(connection)
    for block in model.vision_tower.encoder.blocks:
        block.register_forward_hook(announce)
    speed_up(
        model,
        max_patches=settings.max_patches_per_forward,
        use_graphs=settings.use_graphs,
        use_compile=settings.use_compile,
    )
    return model


def _announcer(connection: Connection) -> Callable[..., None]:
    """A hook that tells the parent now and then that a long forward gets on."""
    last = time.monotonic()

    def announce(*_: object) -> None:
        nonlocal last
        if time.monotonic() - last >= ADVANCING_EVERY_S:
            last = time.monotonic()
            connection.send(Advancing())

    return announce


def _serve(connection: Connection, start: Start, model: VisionModel) -> None:
    settings = start.settings
    dtype = model.projector.linear_2.weight.dtype
    encoder = LocalEncoder(model, torch.device(settings.device), settings.max_patches_per_forward)
    exchange = Exchange(start.pixels_fd, start.rows_fd, model.config.text_hidden_size)
    connection.send(Ready(dtype))
    while True:
        message: Encode | Stop = connection.recv()
        if isinstance(message, Stop):
            return
        encoded = encoder.encode(exchange.images(message.grids), message.grids)
        if settings.tp_rank == 0:  # all ranks have the same rows
            exchange.write_rows(encoded, message.grids, dtype)
        errors = {index: str(rows) for index, rows in enumerate(encoded) if isinstance(rows, KimiError)}
        connection.send(Encoded(errors))


if __name__ == "__main__":
    main(int(sys.argv[1]))
