# SPDX-License-Identifier: Apache-2.0
"""Token ids and image rows -> streamed text. The contract is config.pbtxt, next door."""

import json

import numpy as np

from kimi_triton import triton_io
from kimi_triton.llm.build import build_step
from kimi_triton.llm.step import LlmRequest


class TritonPythonModel:
    def initialize(self, args):
        options = triton_io.StepOptions(args)
        self.step, self.line = build_step(options), options.answer_line
        self.line.clear()

    def execute(self, requests):
        for request in requests:
            caller = Caller(request, self.line)
            try:
                self.step.submit(read(request), caller)
            except Exception as exc:
                caller.respond_error(exc)

    def is_ready(self):  # newer servers ask
        return self.step.engine.is_healthy()

    def finalize(self):
        self.step.stop()


def read(request):
    return LlmRequest(
        request_id=request.request_id(),
        input_ids=triton_io.read_array(request, "input_ids"),
        image_grid_thw=triton_io.read_array(request, "image_grid_thw")[0],
        image_embeds=triton_io.read_torch(request, "image_embeds")[0],
        generation=triton_io.read_one(request, "generation"),
        cached_images=int(triton_io.read_array(request, "image_cached").sum()),
        timeout_s=triton_io.timeout_s(request),
        received_s=triton_io.received_s(request),
    )


class Caller(triton_io.AnswerStream):
    """The caller of one request, as LlmStep sees it."""

    def respond(self, answer, final):
        outputs = {
            "text_output": triton_io.bytes_array([answer.text.encode()]),
            "reasoning_output": triton_io.bytes_array([answer.reasoning.encode()]),
            "finish_reason": triton_io.bytes_array([(answer.finish_reason or "").encode()]),
            "prompt_tokens": np.array([answer.prompt_tokens], np.int32),
            "completion_tokens": np.array([answer.completion_tokens], np.int32),
            "cached_images": np.array([answer.cached_images], np.int32),
            "logprobs": triton_io.bytes_array([json.dumps(answer.logprobs or []).encode()]),
        }
        self.send(outputs, final)
