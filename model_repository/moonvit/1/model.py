# SPDX-License-Identifier: Apache-2.0
"""Patches and grid -> rows for the language model. The contract is config.pbtxt, next door."""

from kimi_triton import triton_io
from kimi_triton.errors import KimiError
from kimi_triton.vision.step import VisionInputs, VisionStep


class TritonPythonModel:
    def initialize(self, args):
        options = triton_io.StepOptions(args)
        self.step, self.board = VisionStep.from_triton(options), options.cancel_board
        self.budget, self.line = options.pixel_budget, options.answer_line
        self.budget.clear()
        # Workers with whole copies of the weights are kept busy by several batches at once.
        threads = self.step.batches_at_once
        self.threads = triton_io.BatchThreads(self._answer, threads) if threads > 1 else None

    def execute(self, requests):
        return self.threads.submit(requests) if self.threads else self._answer(requests)

    def _answer(self, requests):
        responses = triton_io.answer_batch(self._encode, requests, self.board)
        for request, response in zip(requests, responses, strict=True):
            self.budget.leave(triton_io.read_array(request, "image_digest")[0])
            if response.has_error():  # it does not go on to the language model
                self.line.leave(triton_io.received_s(request))
        return responses

    def _encode(self, requests):
        results = self.step.encode_batch([self._read(request) for request in requests])
        return [
            result
            if isinstance(result, KimiError)
            else {"image_embeds": result.image_embeds[None], "image_cached": result.image_cached[None]}
            for result in results
        ]

    def _read(self, request):
        return VisionInputs(
            pixel_values=triton_io.read_array(request, "pixel_values")[0],
            image_grid_thw=triton_io.read_array(request, "image_grid_thw")[0],
            image_digest=triton_io.read_array(request, "image_digest")[0],
        )

    def finalize(self):
        if self.threads:
            self.threads.stop()
        self.step.stop()
