# SPDX-License-Identifier: Apache-2.0
"""The subcommands of `kimi-client` that talk to a server. Each returns an exit code; errors are raised."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kimi_client import console
from kimi_client.client import KimiClient, Stream
from kimi_client.embeds_file import EmbedsFile
from kimi_client.errors import InvalidRequest
from kimi_client.request import Options

NOT_READY = 3

OPTION_NAMES = tuple(Options.__annotations__)


def ask(kimi: KimiClient, args: argparse.Namespace) -> int:
    """Answer one question; "-" reads it from stdin."""
    question = sys.stdin.read() if args.question == "-" else args.question
    options = chosen_options(args)
    if args.json or args.no_stream:
        answer = kimi.ask(question, args.images, **options)
        text = json.dumps(dataclasses.asdict(answer), ensure_ascii=False) if args.json else answer.text
        console.write(f"{text}\n")
        return 0
    with kimi.stream(question, args.images, **options) as stream:
        show(stream)
    return 0


def show(stream: Stream) -> str:
    """Write a stream to the terminal as it comes and return its whole text."""
    is_thinking = False
    for chunk in stream:
        if chunk.reasoning:
            console.aside(chunk.reasoning)
            is_thinking = True
        if chunk.text:
            if is_thinking:
                console.aside("\n")
                is_thinking = False
            console.write(chunk.text)
    console.write("\n")
    answer = stream.answer
    usage = answer.usage
    console.note(
        f"{answer.finish_reason}: {usage.prompt_tokens} tokens read, {usage.completion_tokens} written,"
        f" {usage.cached_images} images from the cache"
    )
    return answer.text


def embed(kimi: KimiClient, args: argparse.Namespace) -> int:
    """Write the embeddings of many pictures to one safetensors file, each under its own path."""
    paths = list(dict.fromkeys(args.images))
    progress = console.Progress(len(paths), "images")
    with EmbedsFile(Path(args.out), paths) as file:
        for start in range(0, len(paths), args.batch):
            batch = paths[start : start + args.batch]
            for path, rows in zip(batch, _embed_files(kimi, batch), strict=True):
                file.add(path, rows)
            progress.show(start + len(batch))
    progress.finish(len(paths))
    return 0


def health(kimi: KimiClient, args: argparse.Namespace) -> int:
    """Say what is ready; the exit code says whether everything is."""
    state = kimi.health()
    ready = {"server": state.is_live and state.is_ready, **state.models}
    if args.json:
        console.write(json.dumps(dataclasses.asdict(state)) + "\n")
    else:
        lines = [f"{name:<14} {'ready' if is_ready else 'not ready'}\n" for name, is_ready in ready.items()]
        console.write(f"Triton {state.server_version}\n" + "".join(lines))
    return 0 if all(ready.values()) else NOT_READY


def chosen_options(args: argparse.Namespace) -> Options:
    """Return the generation options that were given, so that the server's defaults hold for the others."""
    chosen = {name: getattr(args, name) for name in OPTION_NAMES}
    return cast(Options, {name: value for name, value in chosen.items() if value is not None})


def _embed_files(kimi: KimiClient, paths: list[str]) -> list[NDArray[np.float32]]:
    try:
        return kimi.embed(paths)
    except InvalidRequest as error:
        # The index in the message counts within the batch, which the user of a command knows nothing of.
        named = re.sub(r"^image (\d+)", lambda match: paths[int(match[1])], str(error))
        raise InvalidRequest(named) from error
