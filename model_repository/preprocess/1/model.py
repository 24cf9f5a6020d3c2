# SPDX-License-Identifier: Apache-2.0
"""Encoded pictures and text -> patches, grid, token ids. The contract is config.pbtxt, next door."""

import time

import numpy as np

from kimi_triton import triton_io
from kimi_triton.preprocess.pipeline import Preprocessor, PreprocessRequest
from kimi_triton.preprocess.queue_guard import QueueGuard


class TritonPythonModel:
    def initialize(self, args):
        options = triton_io.StepOptions(args)
        self.board, self.budget, self.line = options.cancel_board, options.pixel_budget, options.answer_line
        self.queue = QueueGuard.from_triton(options)
        self.preprocessor = Preprocessor.from_triton(options)

    def execute(self, requests):
        return triton_io.answer_each(self._preprocess, requests)

    def _preprocess(self, request):
        received_s = time.monotonic()
        triton_io.refuse_unwanted(request, self.board)
        self.queue.refuse_excess()
        self.budget.refuse_when_full()
        want_prompt = triton_io.wants(request, "input_ids")
        with self.line.entered(received_s if want_prompt else None):
            result = self.preprocessor.run(
                PreprocessRequest(
                    text_input=triton_io.read_one(request, "text_input"),
                    messages=triton_io.read_one(request, "messages"),
                    images=triton_io.read_bytes(request, "image") or [],
                    parameters=triton_io.read_parameters(request),
                    sampling_parameters=triton_io.read_one(request, "sampling_parameters"),
                    want_prompt=want_prompt,
                )
            )
            if triton_io.wants(request, "pixel_values"):
                self.budget.enter(result.image_digest, result.pixel_values.nbytes)
        outputs = {
            "pixel_values": result.pixel_values[None],
            "image_grid_thw": result.image_grid_thw[None],
            "image_digest": result.image_digest[None],
            "received_s": np.array([[received_s]]),
        }
        if result.input_ids is not None:
            outputs["input_ids"] = result.input_ids
            outputs["generation"] = triton_io.bytes_array([result.generation])
        return outputs

    def finalize(self):
        self.queue.stop()
