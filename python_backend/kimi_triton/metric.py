# SPDX-License-Identifier: Apache-2.0
"""Metrics as the steps see them; triton_io puts them on Triton's metrics endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A counter, a gauge, or a histogram with the upper ends of its buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    buckets: tuple[float, ...] = ()


class Metric(Protocol):
    """One time series, of one instance of one model."""

    def increment(self, value: float) -> None:
        """Of a counter or a gauge."""

    def set(self, value: float) -> None:
        """Of a gauge."""

    def observe(self, value: float) -> None:
        """Of a histogram."""
