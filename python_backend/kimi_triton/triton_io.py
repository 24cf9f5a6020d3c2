# SPDX-License-Identifier: Apache-2.0
"""The one module that talks to Triton's Python backend: requests in, responses and errors out.

torch is imported only by the functions that hand out torch tensors: the preprocess step must stay free of it.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from kimi_triton.answer_line import AnswerLine
from kimi_triton.cancel_board import CancelBoard
from kimi_triton.errors import Cancelled, ConfigError, InvalidRequest, KimiError, Unavailable, error_text
from kimi_triton.metric import Metric, MetricSpec
from kimi_triton.orphan import end_when_orphaned
from kimi_triton.pixel_budget import MAX_PIXEL_BYTES, PixelBudget

if TYPE_CHECKING:
    from torch import Tensor

MAX_LLM_REQUESTS = 272  # that run and wait, unless `kimi-triton serve` says otherwise

Outputs = Mapping[str, "np.ndarray[Any, Any] | Tensor"]


class StepOptions:
    """The `parameters` of a step's config.pbtxt, and where Triton put the instance.

    Every step begins with them; from then on its process ends with the server.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        end_when_orphaned()
        check_numpy(np.__version__)
        config = json.loads(args["model_config"])
        self._values = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self.model_name: str = config["name"]
        self.instance_name = args["model_instance_name"]
        self.instance_kind = args["model_instance_kind"]
        self.device_id = int(args["model_instance_device_id"])
        self._model_folder = Path(args["model_repository"])

    @property
    def cancel_board(self) -> CancelBoard:
        """The board that all steps of this server share."""
        return CancelBoard.of_repository(self._model_folder.parent)

    @property
    def pixel_budget(self) -> PixelBudget:
        """The table of pixels on their way that all steps of this server share."""
        max_bytes = self.integer("max_pixel_bytes", MAX_PIXEL_BYTES)
        return PixelBudget.of_repository(self._model_folder.parent, max_bytes)

    @property
    def answer_line(self) -> AnswerLine:
        """The line of requests for the language model that all steps of this server share."""
        return AnswerLine.of_repository(self._model_folder.parent, self.integer("max_llm_requests", MAX_LLM_REQUESTS))

    def metrics(self, specs: Sequence[MetricSpec]) -> Mapping[str, Metric]:
        """Metrics of this instance by name, labelled with model and instance. They last as long as the mapping."""
        return Metrics(self, specs)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name) or default
        if value is None:
            raise ConfigError(
                f"{self.model_name}: parameter {name!r} is empty; write the repository with `kimi-triton serve`"
            )
        return value

    def path(self, name: str) -> Path:
        return Path(self.text(name))

    def integer(self, name: str, default: int) -> int:
        value = self.text(name, str(default))
        try:
            return int(value)
        except ValueError:
            raise ConfigError(f"{self.model_name}: parameter {name!r} is {value!r}, expected an integer") from None


class Metrics(Mapping[str, Metric]):
    """Time series on Triton's metrics endpoint; the families must live as long as they do."""

    def __init__(self, options: StepOptions, specs: Sequence[MetricSpec]) -> None:
        labels = {"model": options.model_name, "instance": options.instance_name}
        self._families = {spec.name: _metric_family(spec) for spec in specs}
        self._metrics = {spec.name: _metric(self._families[spec.name], spec, labels) for spec in specs}

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


def _metric_family(spec: MetricSpec) -> Any:
    kind = getattr(pb_utils.MetricFamily, spec.kind.upper())
    return pb_utils.MetricFamily(name=spec.name, description=spec.description, kind=kind)


def _metric(family: Any, spec: MetricSpec, labels: dict[str, str]) -> Metric:
    metric: Metric = family.Metric(labels=labels, **({"buckets": list(spec.buckets)} if spec.buckets else {}))
    return metric


def check_numpy(version: str) -> None:
    """Servers up to 24.10 send every output empty, without an error, when their stub runs with NumPy 2."""
    if int(version.split(".")[0]) >= 2:
        raise ConfigError(f"NumPy {version} is installed, Triton's Python stub needs numpy<2 or loses every output")


def read_bytes(request: Any, name: str) -> list[bytes] | None:
    """The elements of the BYTES input `name`, None when the request does not carry it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else [bytes(element) for element in tensor.as_numpy().reshape(-1)]


def read_one(request: Any, name: str) -> bytes | None:
    """The only element of the BYTES input `name`, None when the request does not carry it."""
    elements = read_bytes(request, name)
    if elements is None:
        return None
    if len(elements) != 1:
        raise InvalidRequest(f"{name} has {len(elements)} elements, expected 1")
    return elements[0]


def read_array(request: Any, name: str) -> np.ndarray[Any, Any]:
    """The input `name` as an array in host memory."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if not tensor.is_cpu():
        raise KimiError(f"{name} arrived in GPU memory, every step reads host memory")
    array: np.ndarray[Any, Any] = tensor.as_numpy()
    return array


def read_torch(request: Any, name: str) -> Tensor:
    """The input `name` as a torch tensor in host memory that shares the request's storage; the way to read BF16."""
    from torch.utils.dlpack import from_dlpack

    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if not tensor.is_cpu():
        raise KimiError(f"{name} arrived in GPU memory, every step reads host memory")
    return from_dlpack(tensor.to_dlpack())


def bytes_array(elements: Sequence[bytes]) -> np.ndarray[Any, Any]:
    """(len(elements),) BYTES tensor. numpy's own bytes type would cut trailing zeros."""
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def read_parameters(request: Any) -> dict[str, str | int | bool | float]:
    """The request parameters; an ensemble hands them to each of its steps."""
    parameters: dict[str, str | int | bool | float] = json.loads(request.parameters() or "{}")
    return parameters


def timeout_s(request: Any) -> float | None:
    """Seconds that are left of the request parameter `timeout`, which is in microseconds; None: there is no limit.

    They count from `received_s`.
    """
    microseconds = read_parameters(request).get("timeout") or request.timeout()
    if not microseconds:
        return None
    received = received_s(request)
    waited = 0.0 if received is None else time.monotonic() - received
    return float(microseconds) / 1e6 - waited


def received_s(request: Any) -> float | None:
    """When the first step of the ensemble began, by time.monotonic(), which all processes of a host share."""
    tensor = pb_utils.get_input_tensor_by_name(request, "received_s")
    return None if tensor is None else float(tensor.as_numpy().item())


def wants(request: Any, output: str) -> bool:
    """Whether the caller, or the ensemble around the step, asked for `output`."""
    return output in request.requested_output_names()


def refuse_unwanted(request: Any, board: CancelBoard) -> None:
    """Raise Cancelled when the request is on the board, which it then leaves, and Unavailable when it is overdue."""
    request_id = request.request_id()
    if request_id and board.is_posted(request_id):
        board.settle(request_id, was_running=True)
        raise Cancelled("the request was cancelled before this step")
    if (left := timeout_s(request)) is not None and left <= 0:
        raise Unavailable(f"the time limit of the request passed {-left:.1f} s before this step")


def answer_each(function: Callable[[Any], Outputs], requests: Sequence[Any]) -> list[Any]:
    """One response per request; an error in one never touches its neighbours."""
    responses = []
    for request in requests:
        try:
            responses.append(_response(request, function(request)))
        except Exception as exc:
            responses.append(_error_response(exc))
    return responses


def answer_batch(
    function: Callable[[Sequence[Any]], Sequence[Outputs | KimiError]], requests: Sequence[Any], board: CancelBoard
) -> list[Any]:
    """Like `answer_each` for work that is done for all requests together and returns outputs or an error for each.

    What was cancelled or timed out on the way takes no part in the work.
    """
    results: dict[int, Outputs | KimiError] = {}
    for place, request in enumerate(requests):
        try:
            refuse_unwanted(request, board)
        except KimiError as exc:
            results[place] = exc
    wanted = [place for place in range(len(requests)) if place not in results]
    try:
        results |= zip(wanted, function([requests[place] for place in wanted]), strict=True)
    except Exception as exc:
        results |= dict.fromkeys(wanted, _as_kimi_error(exc))
    return [_outcome(request, results[place]) for place, request in enumerate(requests)]


def _outcome(request: Any, result: Outputs | KimiError) -> Any:
    return _error_response(result) if isinstance(result, KimiError) else _response(request, result)


class BatchThreads:
    """Answers several batches of requests at once, each in a thread, for a model whose `execute` returns None."""

    def __init__(self, answer: Callable[[Sequence[Any]], Sequence[Any]], num_threads: int) -> None:
        """`answer` gives one response for each request of a batch."""
        self._answer = answer
        self._free = threading.Semaphore(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="batch")

    def submit(self, requests: Sequence[Any]) -> None:
        """Return as soon as a thread has taken the batch; meanwhile the server collects the next one."""
        self._free.acquire()
        self._threads.submit(self._run, requests)

    def stop(self) -> None:
        """Wait for the batches that were taken."""
        self._threads.shutdown()

    def _run(self, requests: Sequence[Any]) -> None:
        try:
            responses = self._answer(requests)
        except Exception as exc:
            responses = [_error_response(exc)] * len(requests)
        finally:
            self._free.release()
        for request, response in zip(requests, responses, strict=True):
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class ResponseStream:
    """The responses of one request that is answered later; exactly one of them is final."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._sender = request.get_response_sender()

    def send(self, outputs: Outputs, final: bool) -> None:
        """Send outputs; the last ones travel together with the final flag, as unary callers need."""
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(_response(self._request, outputs), flags=flags)

    def fail(self, error: Exception) -> None:
        """Send an error as the final response."""
        self._sender.send(_error_response(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        cancelled: bool = self._sender.is_cancelled()
        return cancelled


class AnswerStream(ResponseStream):
    """The responses of the language model to one request, which is in the line until the final one goes out."""

    def __init__(self, request: Any, line: AnswerLine) -> None:
        super().__init__(request)
        self._line = line
        self._place = received_s(request)
        line.arrive(self._place)

    def send(self, outputs: Outputs, final: bool) -> None:
        if final:
            self._line.leave(self._place)
        super().send(outputs, final)

    def fail(self, error: Exception) -> None:
        self._line.leave(self._place)
        super().fail(error)

    respond_error = fail


def _response(request: Any, outputs: Outputs) -> Any:
    requested = request.requested_output_names()
    tensors = [_tensor(name, value) for name, value in outputs.items() if not requested or name in requested]
    return pb_utils.InferenceResponse(tensors)


def _tensor(name: str, value: Any) -> Any:
    if hasattr(value, "__dlpack__") and hasattr(value, "is_cuda"):  # a torch tensor; numpy has no BF16
        return pb_utils.Tensor.from_dlpack(name, value.contiguous())
    return pb_utils.Tensor(name, value)


def _error_response(error: Exception) -> Any:
    error = _as_kimi_error(error)
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error_text(error), code))


def _as_kimi_error(error: Exception) -> KimiError:
    """What a caller may see. An unforeseen exception goes to the log in full and to the caller by its type."""
    if isinstance(error, KimiError):
        return error
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    return KimiError(f"{type(error).__name__}; the server's log has the details")
