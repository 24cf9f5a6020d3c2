# SPDX-License-Identifier: Apache-2.0
"""A language model that follows a script, and callers that write down what they get."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kimi_triton.errors import KimiError
from kimi_triton.llm.answer import Answer
from kimi_triton.llm.engine import FinishReason, Token, TokenRequest
from kimi_triton.llm.latent_cache import Segment
from kimi_triton.llm.request import LlmRequest
from kimi_triton.text.options import GenerationOptions

TIMEOUT_S = 20.0
Script = Callable[[list[int]], "int | Tensor"]  # all ids so far -> next id, or logits (vocab,)


def greedy(**options: object) -> GenerationOptions:
    return GenerationOptions(**({"temperature": 0.0} | options))  # type: ignore[arg-type]


class ScriptedDecoder:
    """A Decoder whose rows are lists of ids, so that a mix-up of rows or positions changes what the script sees."""

    device = torch.device("cpu")

    def __init__(self, script: Script, vocab_size: int = 600, step_s: float = 0.0) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.step_s = step_s
        self.rows: dict[int, list[int]] = {}
        self.steps: list[list[Segment]] = []

    def embed(self, token_ids: Tensor) -> Tensor:
        return token_ids.double().unsqueeze(1)

    def forward(self, inputs_embeds: Tensor, segments: Sequence[Segment], num_decode: int) -> Tensor:
        time.sleep(self.step_s)
        assert all(segment.length == 1 for segment in segments[:num_decode])
        self.steps.append(list(segments))
        ids, logits = inputs_embeds[:, 0].long().tolist(), []
        for segment in segments:
            row = self.rows.setdefault(segment.row, [])
            assert len(row) == segment.start
            row += ids[: segment.length]
            ids = ids[segment.length :]
            logits.append(self._logits(self.script(list(row))))
        assert not ids
        return torch.stack(logits)

    def _logits(self, said: int | Tensor) -> Tensor:
        if isinstance(said, Tensor):
            return said
        return torch.nn.functional.one_hot(torch.tensor(said), self.vocab_size).float() * 10

    def reserve(self, rows: int, capacity: int) -> None:
        assert rows > max(self.rows, default=0)
        assert capacity >= max(map(len, self.rows.values()), default=0)

    def move(self, source: int, target: int, length: int) -> None:
        assert not self.rows.get(target)
        self.rows[target] = self.rows.get(source, [])[:length]

    def clear(self, row: int, length: int) -> None:
        assert len(self.rows.get(row, [])) <= length
        self.rows.pop(row, None)


class RecordingSink:
    """Takes tokens until `wanted` of them are there."""

    def __init__(self, wanted: int = 10**9) -> None:
        self.wanted = wanted
        self.tokens: list[Token] = []
        self.ends: list[FinishReason | KimiError] = []
        self.done = threading.Event()

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    def on_token(self, token: Token, more: bool = False) -> bool:  # noqa: ARG002
        assert not self.ends
        self.tokens.append(token)
        if token.finish_reason is not None:
            self._end(token.finish_reason)
        return len(self.tokens) < self.wanted

    def on_end(self, reason: FinishReason) -> None:
        self._end(reason)

    def on_error(self, error: KimiError) -> None:
        self._end(error)

    def _end(self, how: FinishReason | KimiError) -> None:
        self.ends.append(how)
        self.done.set()

    def wait(self) -> FinishReason | KimiError:
        assert self.done.wait(TIMEOUT_S)
        assert len(self.ends) == 1
        return self.ends[0]


class RecordingCaller:
    """A Caller that refuses to be called again after its final response."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.error: KimiError | None = None
        self.done = threading.Event()
        self.gone = False

    def respond(self, answer: Answer, final: bool) -> None:
        assert not self.done.is_set(), "a response after the final one"
        assert final == (answer.finish_reason is not None)
        self.answers.append(answer)
        if final:
            self.done.set()

    def respond_error(self, error: KimiError) -> None:
        assert not self.done.is_set(), "an error after the final response"
        self.error = error
        self.done.set()

    def is_cancelled(self) -> bool:
        return self.gone

    def wait(self) -> Answer:
        """The last answer, once it is final."""
        assert self.done.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return self.answers[-1]

    @property
    def text(self) -> str:
        return "".join(answer.text for answer in self.answers)

    @property
    def reasoning(self) -> str:
        return "".join(answer.reasoning for answer in self.answers)


def token_request(ids: Sequence[int], request_id: str = "r", **changes: object) -> TokenRequest:
    settings: dict[str, object] = {
        "request_id": request_id,
        "input_ids": torch.tensor(ids),
        "image_embeds": torch.zeros(0, 1, dtype=torch.bfloat16),
        "options": greedy(),
        "max_tokens": 8,
    }
    return TokenRequest(**(settings | changes))  # type: ignore[arg-type]


def llm_request(
    ids: Sequence[int],
    image_embeds: Tensor,
    grids: Sequence[Sequence[int]] = (),
    request_id: str = "",
    **options: object,
) -> LlmRequest:
    timeout_s = options.pop("timeout_s", None)
    return LlmRequest(
        request_id=request_id,
        input_ids=np.array(ids, dtype=np.int32),
        image_grid_thw=np.array(grids, dtype=np.int64).reshape(-1, 3),
        image_embeds=image_embeds,
        generation=greedy(**options).to_json(),
        timeout_s=timeout_s,
    )
