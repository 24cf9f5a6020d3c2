# SPDX-License-Identifier: Apache-2.0
"""The id of a request -> whether it was stopped. The contract is config.pbtxt, next door."""

import numpy as np

from kimi_triton import triton_io
from kimi_triton.cancel_desk import CancelDesk
from kimi_triton.errors import KimiError


class TritonPythonModel:
    def initialize(self, args):
        self.desk = CancelDesk(triton_io.StepOptions(args).cancel_board)

    def execute(self, requests):
        for request in requests:
            stream = triton_io.ResponseStream(request)
            try:
                self.desk.submit(triton_io.read_one(request, "request_id"), answer(stream))
            except KimiError as exc:
                stream.fail(exc)

    def finalize(self):
        self.desk.stop()


def answer(stream):
    return lambda was_running: stream.send({"cancelled": np.array([was_running])}, final=True)
