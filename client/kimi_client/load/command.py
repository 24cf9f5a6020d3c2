# SPDX-License-Identifier: Apache-2.0
"""`kimi-client load`: run a load test and report it, or compare two."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from kimi_client import console
from kimi_client.errors import InvalidRequest
from kimi_client.load.compare import changes, comparison, new_failures
from kimi_client.load.driver import Driver, Load, Server
from kimi_client.load.mix import Mix, parse_sizes, parse_weighted
from kimi_client.load.perf_analyzer import find_perf_analyzer
from kimi_client.load.report import report
from kimi_client.load.results import LoadTest, read_json, write_csv, write_json
from kimi_client.load.server_figures import server_version

WORSE = 6
PROTOCOLS = ("grpc-stream", "grpc", "http")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kimi-client load`."""
    server = parser.add_argument_group("server")
    server.add_argument("--grpc", default="localhost:8001", metavar="HOST:PORT", help="gRPC endpoint (%(default)s)")
    server.add_argument("--http", default="localhost:8000", metavar="HOST:PORT", help="HTTP endpoint (%(default)s)")
    server.add_argument("--metrics", default="localhost:8002", metavar="HOST:PORT", help="metrics (%(default)s)")
    load = parser.add_argument_group("load")
    load.add_argument("--protocol", action="append", choices=PROTOCOLS, help="may be repeated (grpc-stream)")
    load.add_argument("--concurrency", type=_numbers, metavar="N,N", help="closed loop: requests in flight (1,4,16)")
    load.add_argument("--rate", type=_numbers, metavar="R,R", help="open loop: Poisson arrivals per second")
    load.add_argument("--seconds", type=float, default=60.0, help="length of each run, about (%(default)g)")
    load.add_argument(
        "--requests", type=int, metavar="N", help="exactly N requests in each run, however long they take"
    )
    mix = parser.add_argument_group("requests")
    mix.add_argument("--image-sizes", default="640x480", metavar="WxH:W,...", help="pixels with weights (%(default)s)")
    mix.add_argument("--images-per-request", default="1", metavar="N:W,...", help="with weights (%(default)s)")
    mix.add_argument("--repeat-rate", type=float, default=0.0, metavar="R", help="share of pictures sent before (0)")
    mix.add_argument("--prompt-words", default="16", metavar="N:W,...", help="with weights (%(default)s)")
    mix.add_argument("--max-tokens", type=int, default=32, metavar="N", help="longest answer (%(default)s)")
    mix.add_argument("--seed", type=int, default=0, help="another one draws other requests of the same kind")
    mix.add_argument(
        "--distinct", type=int, default=1000, metavar="N", help="draw at most so many per run (%(default)s)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="FOLDER", help="report.html, result.json and result.csv go here")
    output.add_argument("--title", default="Load test", help="heading of the report")
    output.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="run nothing, compare two")
    output.add_argument("--tolerance", type=float, default=0.1, metavar="R", help="what counts as worse (%(default)g)")


def load(args: argparse.Namespace) -> int:
    """Run the test and write its summary as the last line of stdout, or compare two."""
    return _compare(args) if args.compare else _run(args)


def _run(args: argparse.Namespace) -> int:
    server = Server(args.grpc, args.http, args.metrics)
    mix = Mix(
        image_sizes=parse_sizes(args.image_sizes),
        images_per_request=parse_weighted(args.images_per_request),
        repeat_rate=args.repeat_rate,
        prompt_words=parse_weighted(args.prompt_words),
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    version = server_version(server.http_url)  # before anything else, because most often the server is what is missing
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(server, find_perf_analyzer(), mix, Path(folder), args.distinct)
        runs = list(driver.run_all(_loads(args), args.seconds, args.requests, console.tell))
    test = LoadTest(
        title=args.title,
        made_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        server={"version": f"Triton {version}", **dataclasses.asdict(server)},
        mix=_as_given(args),
        runs=runs,
    )
    if args.out:
        write_all(args.out, test)
    for run in runs:
        if run.error:
            console.complain(run.error)
    console.write(json.dumps(test.summary()) + "\n")
    return 0 if all(not run.error and run.agrees_with_server for run in runs) else 1


def write_all(folder: Path, test: LoadTest) -> None:
    """Write the report, the JSON and the CSV into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "result.json", test)
    write_csv(folder / "result.csv", test)
    (folder / "report.html").write_text(report(test))
    console.tell(f"wrote {folder / 'report.html'}")


def _compare(args: argparse.Namespace) -> int:
    before, after = (read_json(path) for path in args.compare)
    worse = [str(change) for change in changes(before, after) if change.is_worse(args.tolerance)]
    worse += new_failures(before, after)
    console.write("".join(f"worse: {line}\n" for line in worse) or "nothing got worse\n")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "compare.html").write_text(comparison(before, after, args.tolerance))
        console.tell(f"wrote {args.out / 'compare.html'}")
    return WORSE if worse else 0


def _loads(args: argparse.Namespace) -> list[Load]:
    concurrencies = args.concurrency or ([] if args.rate else [1, 4, 16])
    levels = [("concurrency", level) for level in concurrencies] + [("rate", level) for level in args.rate or []]
    if any(mode == "concurrency" and level != int(level) for mode, level in levels):
        raise InvalidRequest(f"concurrency must be whole numbers, got {args.concurrency}")
    return [Load(protocol, mode, level) for protocol in args.protocol or PROTOCOLS[:1] for mode, level in levels]  # type: ignore[arg-type]


def _as_given(args: argparse.Namespace) -> dict[str, Any]:
    names = ("image_sizes", "images_per_request", "repeat_rate", "prompt_words", "max_tokens", "seed")
    return {name.replace("_", " "): getattr(args, name) for name in names}


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise argparse.ArgumentTypeError(f"expected positive numbers like 1,4,16, got {text!r}")
    return numbers
