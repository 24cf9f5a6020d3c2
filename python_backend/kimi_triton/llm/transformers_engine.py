# SPDX-License-Identifier: Apache-2.0
"""The engine that lives in this process: one thread that decodes all running requests together.

Each turn of the thread ends what was cancelled or is out of time, lets waiting requests in, runs one forward pass and
delivers its tokens. Whatever goes wrong for one request ends that request alone.
"""

from __future__ import annotations

import logging
import threading
import time

import torch
from torch import Tensor

from kimi_triton.errors import ConfigError, InvalidRequest, KimiError, Unavailable
from kimi_triton.llm.decoder import Decoder
from kimi_triton.llm.engine import FinishReason, Token, TokenRequest, TokenSink, as_kimi_error
from kimi_triton.llm.fusion import merge_image_rows
from kimi_triton.llm.sampling import Sampled, TokenSampler, sample
from kimi_triton.llm.scheduler import EngineLimits, LiveRequest, Scheduler, StepPlan
from kimi_triton.llm.token_roles import TokenRoles

logger = logging.getLogger(__name__)


class TransformersEngine:
    """Continuous batching over a Decoder. See `engine.Engine` for the methods."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        roles: TokenRoles,
        media_token_id: int,
        context_length: int,
        limits: EngineLimits | None = None,
    ) -> None:
        self.context_length = context_length
        self._limits = limits or EngineLimits()
        if self._limits.cache_tokens < context_length:
            raise ConfigError(
                f"cache_tokens is {self._limits.cache_tokens}, one request can need {context_length} (the context)"
            )
        self._decoder = decoder
        self._stop_ids = roles.stop
        self._media_token_id = media_token_id
        self._blocked = torch.zeros(decoder.vocab_size, dtype=torch.bool, device=decoder.device)
        self._blocked[sorted(roles.blocked)] = True
        self._scheduler = Scheduler(self._limits)
        self._changed = threading.Condition()
        # Guarded by _changed; all else belongs to the engine's thread.
        self._live: dict[str, LiveRequest] = {}
        self._submitted: list[LiveRequest] = []
        self._cancelled: set[str] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_healthy(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def submit(self, request: TokenRequest, sink: TokenSink) -> None:
        with self._changed:
            if not self.is_healthy():
                raise Unavailable("the language model is not running")
            if request.request_id in self._live:
                raise InvalidRequest(f"request id {request.request_id!r} belongs to a request that is still running")
            most = self._limits.max_running + self._limits.max_waiting
            if len(self._live) >= most:
                raise Unavailable(
                    f"{len(self._live)} requests are running or waiting, the limits are "
                    f"{self._limits.max_running} and {self._limits.max_waiting}"
                )
            live = LiveRequest(request, sink)
            self._live[request.request_id] = live
            self._submitted.append(live)
            self._changed.notify()

    def cancel(self, request_id: str) -> bool:
        with self._changed:
            if request_id not in self._live:
                return False
            self._cancelled.add(request_id)
            self._changed.notify()
            return True

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._end_overdue()
                    self._admit()
                    if plan := self._scheduler.plan():
                        self._step(plan)
        except Exception:
            logger.exception("the language model's engine has failed")
        finally:
            self._stop_all()

    def _wait_for_work(self) -> bool:
        """Take in what was submitted; False when the engine shall stop."""
        with self._changed:
            while not (self._live or self._stopping):
                self._changed.wait()
            self._scheduler.waiting.extend(self._submitted)
            self._submitted.clear()
            return not self._stopping

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for live in [*self._scheduler.running, *self._scheduler.waiting]:
            deadline = live.request.deadline
            if live.request.request_id in self._cancelled:
                self._end(live, "cancelled")
            elif deadline is None or now < deadline:
                continue
            elif live.row < 0:
                self._fail(live, Unavailable("no place became free within the time limit of the request"))
            else:
                self._end(live, "deadline")

    def _admit(self) -> None:
        while live := self._scheduler.next_admitted():
            try:
                live.prompt_rows = self._prompt_rows(live.request)
                live.sampler = TokenSampler(
                    live.request.options, live.request.input_ids, self._decoder.vocab_size, self._decoder.device
                )
            except Exception as exc:
                self._fail(live, as_kimi_error(exc))

    def _prompt_rows(self, request: TokenRequest) -> Tensor:
        rows = self._decoder.embed(request.input_ids.to(self._decoder.device))
        is_placeholder = request.input_ids == self._media_token_id
        return merge_image_rows(rows, is_placeholder.to(rows.device), request.image_embeds.to(rows.device))

    def _step(self, plan: StepPlan) -> None:
        try:
            logits = self._forward(plan)
            for live, segment in plan:
                live.num_cached = segment.end
            rows = [index for index, live in enumerate(plan.requests) if live.decodes]
            sampling = [plan.requests[index] for index in rows]
            sampled = sample(logits[rows], self._blocked, [live.sampler for live in sampling])
        except Exception as exc:
            error = as_kimi_error(exc)
            for live, segment in plan:
                live.num_cached = segment.end  # it may have been written
                self._fail(live, error)
            return
        for live, result in zip(sampling, sampled, strict=True):
            self._deliver(live, result)

    def _forward(self, plan: StepPlan) -> Tensor:
        self._decoder.reserve(len(self._scheduler.running), plan.longest)
        decoding = torch.tensor([live.last_token for live in plan.requests[: plan.num_decode]], dtype=torch.int64)
        parts = [self._decoder.embed(decoding.to(self._decoder.device))] if plan.num_decode else []
        for live, segment in list(plan)[plan.num_decode :]:
            assert live.prompt_rows is not None
            parts.append(live.prompt_rows[segment.start : segment.end])
            if segment.end == live.num_prompt:
                live.prompt_rows = None
        return self._decoder.forward(torch.cat(parts), plan.segments, plan.num_decode)

    def _deliver(self, live: LiveRequest, sampled: Sampled) -> None:
        if live.request.request_id in self._cancelled:
            self._end(live, "cancelled")
            return
        if sampled.token_id is None:
            self._fail(live, KimiError(f"the logits of token {live.num_sampled} of the answer are not finite"))
            return
        live.last_token = sampled.token_id
        live.num_sampled += 1
        reason = self._finish_reason(live)
        try:
            wants_more = live.sink.on_token(Token(sampled.token_id, sampled.logprob, reason))
        except Exception as exc:
            self._fail(live, as_kimi_error(exc))
            return
        if reason or not wants_more:
            self._remove(live)

    def _finish_reason(self, live: LiveRequest) -> FinishReason | None:
        if live.last_token in self._stop_ids:
            return "stop"
        return "length" if live.num_sampled >= live.request.max_tokens else None

    def _end(self, live: LiveRequest, reason: FinishReason) -> None:
        self._remove(live)
        try:
            live.sink.on_end(reason)
        except Exception:
            logger.exception("request %s could not be told that it ended", live.request.request_id)

    def _fail(self, live: LiveRequest, error: KimiError) -> None:
        self._remove(live)
        try:
            live.sink.on_error(error)
        except Exception:
            logger.exception("request %s could not be told of its failure: %s", live.request.request_id, error)

    def _remove(self, live: LiveRequest) -> None:
        """Give its row and its id back."""
        moved = self._scheduler.remove(live)
        if live.row >= 0:
            self._decoder.clear(live.row, live.num_cached)
        if moved is not None:
            self._decoder.move(len(self._scheduler.running), moved.row, moved.num_cached)
            self._decoder.clear(len(self._scheduler.running), moved.num_cached)
        with self._changed:
            del self._live[live.request.request_id]
            self._cancelled.discard(live.request.request_id)

    def _stop_all(self) -> None:
        with self._changed:
            self._stopping = True
            left, self._live = list(self._live.values()), {}
        for live in left:
            try:
                live.sink.on_error(Unavailable("the language model has stopped"))
            except Exception:
                logger.exception("request %s could not be told of the stop", live.request.request_id)
