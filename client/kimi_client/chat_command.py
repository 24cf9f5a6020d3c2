# SPDX-License-Identifier: Apache-2.0
"""`kimi-client chat`: a conversation in the terminal, or turn by turn from a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from kimi_client import console
from kimi_client.client import KimiClient
from kimi_client.commands import chosen_options, show
from kimi_client.errors import InvalidRequest, KimiClientError
from kimi_client.images import image_element
from kimi_client.messages import Message, user_message
from kimi_client.request import Options

HELP = """/image PATH   show a picture with the next message; may be given several times
/reset        forget the conversation and the pictures
/quit         leave, as does Ctrl-D; Ctrl-C stops an answer"""


class Conversation:
    """What has been said, and the pictures that go with the next message."""

    def __init__(self, system: str | None) -> None:
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages: list[Message] = list(self._opening)
        self.pictures: list[bytes] = []

    def command(self, line: str) -> str:
        """Carry out a line that starts with a slash and return what to tell the user."""
        name, _, argument = line.partition(" ")
        if name == "/image" and argument.strip():
            # Read now, so that the picture is the one the user meant and a wrong path is told at once.
            self.pictures.append(image_element(argument.strip(), len(self.pictures)))
            return f"{len(self.pictures)} image(s) go with the next message"
        if name == "/reset":
            self.reset()
            return "forgotten"
        if name == "/help":
            return HELP
        raise InvalidRequest(f"unknown command {line!r}; /help lists them")

    def say(self, kimi: KimiClient, text: str, options: Options) -> None:
        """Send one message and show the answer. The turn is remembered only if it was answered to its end."""
        turn = user_message(text, self.pictures)
        with kimi.stream([*self.messages, turn], **options) as stream:
            answer = show(stream)
        self.messages += [turn, {"role": "assistant", "content": answer}]
        self.pictures = []


def chat(kimi: KimiClient, args: argparse.Namespace) -> int:
    """Run the conversation. From a pipe the first error ends it; a person is told and may go on."""
    conversation = Conversation(args.system)
    is_person = sys.stdin.isatty()
    for line in _lines(is_person):
        if line == "/quit":
            break
        try:
            if line.startswith("/"):
                console.note(conversation.command(line))
            else:
                conversation.say(kimi, line, chosen_options(args))
        except KeyboardInterrupt:
            if not is_person:
                raise
            console.note("\nstopped")
        except KimiClientError as error:
            if not is_person:
                raise
            console.complain(str(error))
    return 0


def _lines(is_person: bool) -> Iterator[str]:
    if is_person:
        import readline  # noqa: F401  (gives `input` line editing and history)

        console.note("Ask about pictures; /help lists the commands.")
    while True:
        try:
            line = input("> " if is_person else "").strip()
        except EOFError:
            return
        if line:
            yield line
