# SPDX-License-Identifier: Apache-2.0
"""From chat messages to input_ids, in the grammar each family was trained with.

A turn is a role token, a role word, <|im_middle|>, content and <|im_end|>, with nothing between turns:

    <|im_user|>user<|im_middle|>...<|im_end|><|im_assistant|>assistant<|im_middle|>

Control ids are put in by name and everything a caller wrote is encoded as text, so no text can become a control token.
The text between two control tokens is encoded in one go, because that is how the model saw it in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kimi_triton.config import Family
from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.patches import Grid, num_image_tokens
from kimi_triton.text import special_tokens as tokens
from kimi_triton.text.messages import ImagePart, Message, Part, Role, TextPart, VideoPart
from kimi_triton.text.tokenizer import KimiTokenizer

KIMI_VL_SYSTEM = "You are a helpful assistant"
ROLE_TOKENS: dict[Role, str] = {
    "system": tokens.IM_SYSTEM,
    "user": tokens.IM_USER,
    "assistant": tokens.IM_ASSISTANT,
    "tool": tokens.IM_SYSTEM,
}


def build_prompt(
    messages: Sequence[Message],
    grids: Sequence[Grid],
    tokenizer: KimiTokenizer,
    family: Family,
    thinking: bool | None = None,
) -> list[int]:
    """input_ids of a conversation up to the point where the model goes on.

    `grids` are the (t, h, w) of the media items in the order of their parts; each gets one placeholder per image
    token. Raises InvalidRequest when their number differs from the parts', or for what the family cannot express.
    """
    check_media_count(messages, len(grids))
    prompt = _Prompt(tokenizer, family, iter(grids))
    if family == "kimi_vl":
        _add_kimi_vl(prompt, messages, thinking)
    else:
        _add_kimi_k25(prompt, messages, thinking is not False)
    return prompt.finish()


def check_media_count(messages: Sequence[Message], num_items: int) -> None:
    """Raises InvalidRequest unless the messages have a place for each of `num_items` media items."""
    places = sum(_num_items(part) for message in messages for part in message.parts)
    if places != num_items:
        raise InvalidRequest(f"messages have {places} image parts, but the request brings {num_items} images")


def _num_items(part: Part) -> int:
    return len(part.timestamps) if isinstance(part, VideoPart) else int(isinstance(part, ImagePart))


def _add_kimi_vl(prompt: _Prompt, messages: Sequence[Message], thinking: bool | None) -> None:
    """Kimi-VL: a default system prompt, plain role words, and no way to ask for thinking or for tools."""
    if thinking is not None:
        raise InvalidRequest("option thinking has no effect on Kimi-VL: leave it out")
    if messages[0].role != "system":
        prompt.turn("system", "system", [TextPart(KIMI_VL_SYSTEM)])
    for index, message in enumerate(messages):
        if message.role == "tool" or message.tool_calls:
            raise InvalidRequest(f"messages[{index}] is about a tool, which Kimi-VL's prompt cannot express")
        prompt.turn(message.role, message.role, message.parts)
    prompt.start_turn("assistant", "assistant")


def _add_kimi_k25(prompt: _Prompt, messages: Sequence[Message], thinking: bool) -> None:
    """K2.5 and K2.6: no system prompt of their own; a name takes the place of the role word.

    Earlier answers come with an empty thought. Behind the last finished answer, where the model is in the middle of
    calling tools, it is shown what it thought before each call.
    """
    finished = [i for i, message in enumerate(messages) if message.role == "assistant" and not message.tool_calls]
    last_finished = finished[-1] if finished else -1
    for index, message in enumerate(messages):
        prompt.start_turn(message.role, message.name or message.role)
        if message.role == "assistant":
            prompt.thought(message.reasoning_content if thinking and index > last_finished else "")
        if message.role == "tool":
            prompt.text(f"## Return of {message.tool_call_id}\n")
        prompt.parts(message.parts)
        if message.tool_calls:
            prompt.tool_calls(message)
        prompt.control(tokens.IM_END)
    prompt.start_turn("assistant", "assistant")
    if thinking:
        prompt.control(tokens.THINK_START)
    else:
        prompt.thought("")


class _Prompt:
    """input_ids under construction. Text is collected until the next control token, then encoded as a whole."""

    def __init__(self, tokenizer: KimiTokenizer, family: Family, grids: Iterator[Grid]) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._grids = grids
        self._input_ids: list[int] = []
        self._text: list[str] = []

    def text(self, text: str) -> None:
        self._text.append(text)

    def control(self, name: str, count: int = 1) -> None:
        self._encode_text()
        self._input_ids += [self._tokenizer.special(name)] * count

    def finish(self) -> list[int]:
        self._encode_text()
        return self._input_ids

    def start_turn(self, role: Role, word: str) -> None:
        self.control(ROLE_TOKENS[role])
        self.text(word)
        self.control(tokens.IM_MIDDLE)

    def turn(self, role: Role, word: str, parts: Sequence[Part]) -> None:
        self.start_turn(role, word)
        self.parts(parts)
        self.control(tokens.IM_END)

    def parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, TextPart):
                self.text(part.text)
            elif isinstance(part, ImagePart):
                self._media("image")
                self.text("\n" if self._family == "kimi_k25" else "")
            else:
                self._video(part)

    def thought(self, text: str) -> None:
        self.control(tokens.THINK_START)
        self.text(text)
        self.control(tokens.THINK_END)

    def tool_calls(self, message: Message) -> None:
        self.control(tokens.TOOL_CALLS_START)
        for call in message.tool_calls:
            self.control(tokens.TOOL_CALL_START)
            self.text(call.id)
            self.control(tokens.TOOL_CALL_ARGUMENT_START)
            self.text(call.arguments)
            self.control(tokens.TOOL_CALL_END)
        self.control(tokens.TOOL_CALLS_END)

    def _video(self, part: VideoPart) -> None:
        """Chunks follow each other directly; one newline ends the video, as it ends an image."""
        if self._family == "kimi_vl":
            raise InvalidRequest("Kimi-VL has no video")
        for timestamp in part.timestamps:
            self.text(timestamp)
            self._media("video")
        self.text("\n")

    def _media(self, word: str) -> None:
        self.control(tokens.MEDIA_START[self._family])
        self.text(word)
        self.control(tokens.MEDIA_CONTENT)
        self.control(tokens.MEDIA_PAD, num_image_tokens(next(self._grids)))
        self.control(tokens.MEDIA_END)

    def _encode_text(self) -> None:
        self._input_ids += self._tokenizer.encode("".join(self._text))
        self._text.clear()
