# SPDX-License-Identifier: Apache-2.0
"""One whole answer of kimi_vl per request, for callers that cannot stream. The contract is config.pbtxt, next door."""

from kimi_triton import triton_io
from kimi_triton.errors import KimiError
from kimi_triton.unary import UnaryFront


class TritonPythonModel:
    def initialize(self, args):
        options = triton_io.StepOptions(args)
        self.line = options.answer_line
        self.front = UnaryFront(options.text("grpc_url"), options.cancel_board, options.integer("max_live", 512))

    def execute(self, requests):
        for request in requests:
            stream = triton_io.ResponseStream(request)
            try:
                self.line.refuse_when_full()
            except KimiError as exc:
                stream.fail(exc)
                continue
            inputs = {
                name: triton_io.read_bytes(request, name)
                for name in ("text_input", "messages", "image", "sampling_parameters")
            }
            self.front.submit(
                inputs,
                triton_io.read_parameters(request),
                request.request_id(),
                triton_io.timeout_s(request),
                stream,
            )

    def finalize(self):
        self.front.stop()
