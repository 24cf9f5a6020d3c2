# SPDX-License-Identifier: Apache-2.0
"""Refuse at the first step what would wait too long in front of it.

Triton cannot limit the queue of a model without a batch dimension. It publishes how many requests wait, so the step
looks there and refuses as many as there are too many, which takes well under a millisecond each.
"""

from __future__ import annotations

import logging
import re
import threading
import urllib.request
from typing import TYPE_CHECKING

from kimi_triton.errors import Unavailable

if TYPE_CHECKING:
    from kimi_triton.triton_io import StepOptions

LOOK_EVERY_S = 0.2
WARN_AFTER = 600  # failures in a row

logger = logging.getLogger(__name__)


class QueueGuard:
    """Watches the queue of `model`, which `num_instances` processes with a guard each share.

    At most `max_waiting` requests shall be in it.
    """

    def __init__(self, metrics_url: str, model: str, num_instances: int, max_waiting: int) -> None:
        self._url = f"http://{metrics_url}/metrics"
        self._pending = re.compile(
            rf'^nv_inference_pending_request_count\{{[^}}]*model="{model}"[^}}]*\}} (\S+)', re.MULTILINE
        )
        self._num_instances = num_instances
        self._max_waiting = max_waiting
        self._to_refuse = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue-guard", daemon=True)
        self._thread.start()

    @classmethod
    def from_triton(cls, options: StepOptions) -> QueueGuard:
        """As the step's parameters say."""
        return cls(
            options.text("metrics_url"),
            options.model_name,
            options.integer("instances", 1),
            options.integer("max_waiting", 128),
        )

    def refuse_excess(self) -> None:
        """Raise Unavailable when this process still has to refuse requests, counting the one at hand."""
        if self._to_refuse > 0:
            self._to_refuse -= 1
            raise Unavailable(f"more than {self._max_waiting} requests wait for the first step")

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def look(self) -> None:
        """Count the requests that wait and share out those that are too many."""
        with urllib.request.urlopen(self._url, timeout=2) as response:
            text = response.read().decode(errors="replace")
        excess = sum(int(float(value)) for value in self._pending.findall(text)) - self._max_waiting
        self._to_refuse = -(-excess // self._num_instances) if excess > 0 else 0

    def _run(self) -> None:
        num_failures = 0
        while not self._stopped.wait(LOOK_EVERY_S):
            try:
                self.look()
                num_failures = 0
            except (OSError, ValueError) as exc:
                self._to_refuse = 0
                num_failures += 1
                if num_failures == WARN_AFTER:  # the endpoint opens when all models are loaded
                    logger.warning("the length of the queue cannot be seen at %s: %s", self._url, exc)
