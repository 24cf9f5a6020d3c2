# SPDX-License-Identifier: Apache-2.0
"""The `kimi-client` command: questions, conversations, embeddings, health and load tests from a shell.

Exit codes: 0 done, 1 the server failed, 2 wrong arguments or a refused request, 3 not reachable or not ready,
4 timed out, 5 cancelled by somebody, 6 a load test got worse, 130 stopped by Ctrl-C, 141 the output's reader left.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kimi_client import __version__, console
from kimi_client.aio import DEFAULT_TIMEOUT_S
from kimi_client.chat_command import chat
from kimi_client.client import KimiClient
from kimi_client.commands import NOT_READY, ask, embed, health
from kimi_client.endpoint import TlsFiles
from kimi_client.errors import InvalidRequest, KimiClientError, RequestCancelled, RequestTimeout, ServerUnavailable
from kimi_client.load.command import add_arguments, load

EXIT_CODES: dict[type[BaseException], int] = {
    InvalidRequest: 2,
    ServerUnavailable: NOT_READY,
    RequestTimeout: 4,
    RequestCancelled: 5,
}
INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except KimiClientError as error:
        console.complain(str(error))
        return EXIT_CODES.get(type(error), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its exit
        return PIPE_CLOSED
    except OSError as error:
        console.complain(str(error))
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    run: Callable[..., int] = args.run
    if run is load:  # speaks to the server by perf_analyzer
        return run(args)
    with KimiClient(
        args.url,
        headers=dict(args.header),
        timeout_s=args.timeout,
        tls=TlsFiles(args.ca_file, args.cert_file, args.key_file),
        shared_memory=args.shared_memory,
    ) as kimi:
        return run(kimi, args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each subcommand sets `run`."""
    parser = argparse.ArgumentParser(prog="kimi-client", description="Talk to a kimi-triton server.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    server, options = _server_arguments(), _option_arguments()

    command = commands.add_parser("ask", parents=[server, options], help="ask one question about some pictures")
    command.add_argument("question", help='the question, or "-" to read it from stdin')
    command.add_argument("images", nargs="*", metavar="IMAGE", help="path or data URL")
    command.add_argument("--json", action="store_true", help="write the answer with usage as one JSON object")
    command.add_argument("--no-stream", action="store_true", help="write the answer when it is complete")
    command.set_defaults(run=ask)

    command = commands.add_parser("chat", parents=[server, options], help="hold a conversation; /help lists commands")
    command.add_argument("--system", metavar="TEXT", help="instructions for the whole conversation")
    command.set_defaults(run=chat)

    command = commands.add_parser("embed", parents=[server], help="write embeddings to a safetensors file")
    command.add_argument("images", nargs="+", metavar="IMAGE", help="path; also the tensor's name in the file")
    command.add_argument("--out", required=True, metavar="FILE.safetensors")
    command.add_argument("--batch", type=_positive, default=8, metavar="N", help="pictures per request (%(default)s)")
    command.set_defaults(run=embed)

    command = commands.add_parser("health", parents=[server], help="say which models are ready")
    command.add_argument("--json", action="store_true", help="write one JSON object")
    command.set_defaults(run=health)

    command = commands.add_parser("load", help="measure the server with perf_analyzer and report it, or compare two")
    add_arguments(command)
    command.set_defaults(run=load)
    return parser


def _server_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default=os.environ.get("KIMI_URL", "localhost:8001"),
        help="host:port or grpc(s)://... for gRPC, http(s)://... for HTTP ($KIMI_URL, else localhost:8001)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds to wait for an answer or the next piece of it (%(default)g)",
    )
    group.add_argument("--header", type=_header, action="append", default=[], metavar="NAME:VALUE")
    group.add_argument("--ca-file", type=Path, metavar="PEM", help="whom to trust instead of the system's authorities")
    group.add_argument("--cert-file", type=Path, metavar="PEM", help="certificate to show to the server")
    group.add_argument("--key-file", type=Path, metavar="PEM", help="its private key")
    group.add_argument("--shared-memory", action="store_true", help="hand large pictures over in /dev/shm (same host)")
    return parser


def _option_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("generation (what is left out is the checkpoint's default)")
    group.add_argument("--max-tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token each time")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="R")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer at TEXT; may be repeated")
    group.add_argument("--logprobs", action="store_const", const=True, help="report them, with --json")
    group.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="let the model reason first")
    return parser


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"expected NAME:VALUE, got {text!r}")
    return name.strip(), value.strip()


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
