# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the module that Triton gives its Python models, as far as triton_io uses it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np


class Tensor:
    def __init__(self, name: str, array: Any, on_cpu: bool = True) -> None:
        self.name, self.array, self.on_cpu = name, array, on_cpu

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        return cls(name, tensor)

    def to_dlpack(self) -> Any:
        return self.array.__dlpack__()

    def as_numpy(self) -> Any:
        return self.array

    def is_cpu(self) -> bool:
        return self.on_cpu


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None

    def has_error(self) -> bool:
        return self.error is not None


@dataclass
class Sender:
    sent: list[tuple[InferenceResponse, int]] = field(default_factory=list)

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        return False


@dataclass
class Request:
    tensors: dict[str, Any]
    raw_parameters: str = ""
    outputs: tuple[str, ...] = ()
    on_cpu: bool = True
    timeout_us: int = 0
    id: str = ""
    sender: Sender = field(default_factory=Sender)

    def request_id(self) -> str:
        return self.id

    def parameters(self) -> str:
        return self.raw_parameters

    def requested_output_names(self) -> list[str]:
        return list(self.outputs)

    def get_response_sender(self) -> Sender:
        return self.sender

    def timeout(self) -> int:
        return self.timeout_us


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:  # noqa: N802 (its name)
        return Metric(self, labels, buckets)


@dataclass
class Metric:
    family: MetricFamily
    labels: dict[str, str]
    buckets: list[float] | None
    values: list[float] = field(default_factory=list)

    def increment(self, value: float) -> None:
        self.values.append(value)

    set = observe = increment


class Logger:
    errors: ClassVar[list[str]] = []

    @classmethod
    def log_error(cls, text: str) -> None:
        cls.errors.append(text)


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return Tensor(name, request.tensors[name], request.on_cpu) if name in request.tensors else None


def install() -> ModuleType:
    """Put the stand-in where `import triton_python_backend_utils` finds it."""
    module = ModuleType("triton_python_backend_utils")
    for value in (Tensor, TritonError, InferenceResponse, MetricFamily, Logger, get_input_tensor_by_name):
        setattr(module, value.__name__, value)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    return sys.modules.setdefault(module.__name__, module)


def bytes_tensor(*elements: bytes) -> np.ndarray[Any, Any]:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array
