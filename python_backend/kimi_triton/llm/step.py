# SPDX-License-Identifier: Apache-2.0
"""The LLM step: checks a request, hands it to an engine, answers its caller exactly once."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from typing import NamedTuple

import numpy as np
import torch

from kimi_triton.cancel_board import CancelBoard
from kimi_triton.llm.answer import Caller
from kimi_triton.llm.answer_text import AnswerText
from kimi_triton.llm.engine import Engine, TokenRequest, as_kimi_error
from kimi_triton.llm.generation import Generation
from kimi_triton.llm.metrics import LlmMetrics, MeasuredSink
from kimi_triton.llm.recent_ids import RecentIds
from kimi_triton.llm.request import LlmRequest, check_prompt
from kimi_triton.llm.token_roles import TokenRoles
from kimi_triton.text.options import GenerationOptions
from kimi_triton.text.tokenizer import KimiTokenizer

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.02  # how often callers are asked whether they are still there
# Asking is a message to the server. Servers we know tell a step of an ensemble nothing; there the board does.
LOOKS_PER_ENSEMBLE_POLL = 5
PUBLISH_EVERY_S = 0.1  # each metric is a message to the server


class _Watched(NamedTuple):
    generation: Generation
    is_direct: bool  # called without an ensemble around the step


class LlmStep:
    """One language model, shared by all ways to call it. `submit` and `cancel` may be called from any thread.

    What is posted on `board` is cancelled too.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: KimiTokenizer,
        roles: TokenRoles,
        media_token_id: int,
        board: CancelBoard | None = None,
        metrics: LlmMetrics | None = None,
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._roles = roles
        self._media_token_id = media_token_id
        self._board = board
        self._metrics = metrics or LlmMetrics()
        self._read_from_board: set[str] = set()
        self._arrived = RecentIds()
        self._watched: dict[str, _Watched] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._watcher = threading.Thread(target=self._watch, name="llm-watcher", daemon=True)

    def start(self) -> None:
        self.engine.start()
        self._watcher.start()

    def stop(self) -> None:
        """Every caller that still waits gets Unavailable."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self.engine.stop()
        self._watcher.join()
        self._metrics.close()

    def submit(self, request: LlmRequest, caller: Caller) -> str:
        """Take a request in and return its id. Whatever is wrong with it reaches `caller` as an error."""
        request_id = request.request_id or uuid.uuid4().hex
        try:
            token_request, generation = self._prepare(request, request_id, caller)
        except Exception as exc:
            self._metrics.count("refused")
            caller.respond_error(as_kimi_error(exc))
            return request_id
        try:
            self._hand_over(token_request, generation, request.received_s)
        except Exception as exc:
            generation.on_error(as_kimi_error(exc))
        return request_id

    def _hand_over(self, request: TokenRequest, generation: Generation, received_s: float | None) -> None:
        request_id = request.request_id
        sink = self._metrics.measure(generation, len(request.input_ids), received_s)
        with self._changed:  # no look at the board comes between our own look and the engine
            is_cancelled = self._board is not None and self._board.is_posted(request_id)
            self._arrived.add(request_id)
            if self._board is not None and is_cancelled:
                self._board.settle(request_id, was_running=True)
            else:
                self._submit(request, sink)
                self._watched[request_id] = _Watched(generation, is_direct=received_s is None)
                self._changed.notify()
        if is_cancelled:
            sink.on_end("cancelled")

    def _submit(self, request: TokenRequest, sink: MeasuredSink) -> None:
        try:
            self.engine.submit(request, sink)
        except Exception:
            sink.refuse()
            raise

    def cancel(self, request_id: str) -> bool:
        """End the request of this id; false when it is not live here, or when its caller has all of its answer."""
        watched = self._watched.get(request_id)
        if watched is not None and watched.generation.is_final:
            return False  # the engine may take a moment longer to forget it
        return self.engine.cancel(request_id)

    def _prepare(self, request: LlmRequest, request_id: str, caller: Caller) -> tuple[TokenRequest, Generation]:
        options = GenerationOptions.from_json(request.generation)
        check_prompt(
            request,
            context_length=self.engine.context_length,
            vocab_size=self._tokenizer.vocab_size,
            media_id=self._media_token_id,
        )
        num_prompt = len(request.input_ids)
        token_request = TokenRequest(
            request_id=request_id,
            input_ids=torch.from_numpy(request.input_ids.astype(np.int64)),
            image_embeds=request.image_embeds.clone(),  # the server may reuse its memory once we return
            options=options,
            max_tokens=min(options.max_tokens, self.engine.context_length - num_prompt),
            deadline=None if request.timeout_s is None else time.monotonic() + request.timeout_s,
        )
        generation = Generation(
            caller,
            AnswerText(self._tokenizer, self._roles, options.stop, self._roles.in_reasoning(request.input_ids)),
            stream=options.stream,
            logprobs=options.logprobs,
            prompt_tokens=num_prompt,
            cached_images=request.cached_images,
        )
        return token_request, generation

    def _watch(self) -> None:
        """Notice callers that have gone away, by way of the board or without a word."""
        publish_at = 0.0
        for look in itertools.count():
            with self._changed:
                self._changed.wait(POLL_INTERVAL_S)
                if self._stopping:
                    return
                watched = list(self._watched.items())
            for request_id, (generation, is_direct) in watched:
                ask = is_direct or look % LOOKS_PER_ENSEMBLE_POLL == 0
                self._look_after(request_id, generation, ask)
            if self._board is not None:
                self._heed(self._board)
            if (now := time.monotonic()) >= publish_at:
                publish_at = now + PUBLISH_EVERY_S
                self._publish()

    def _publish(self) -> None:
        try:
            self._metrics.publish(self.engine.is_healthy())
        except Exception:
            logger.exception("metrics cannot be published")

    def _heed(self, board: CancelBoard) -> None:
        """Cancel what was posted since the last look. A request that is still to come is left for the other steps."""
        try:
            names = board.posted_files()
            for name in names - self._read_from_board:
                request_id = board.posted_id(name)
                if request_id is None:
                    continue
                with self._changed:
                    is_live, has_come = self.cancel(request_id), request_id in self._arrived
                if has_come:
                    board.settle(request_id, was_running=is_live)
            self._read_from_board = names
        except OSError:
            logger.exception("cancellations cannot be read from %s", board.folder)

    def _look_after(self, request_id: str, generation: Generation, ask: bool) -> None:
        try:
            is_cancelled = ask and generation.is_cancelled()
        except Exception:
            logger.exception("request %s cannot be asked whether it is cancelled, so it is", request_id)
            is_cancelled = True
        with self._changed:
            if is_cancelled:
                self.engine.cancel(request_id)
            seen = self._watched.get(request_id)
            if (is_cancelled or generation.is_final) and seen is not None and seen.generation is generation:
                del self._watched[request_id]
