# SPDX-License-Identifier: Apache-2.0
"""What only `kimi-triton serve` may ask its server: to unload and to load a model; and how far a model has got."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request

from kimi_triton.errors import Unavailable

TOKENS = re.compile(r"^kimi_llm_completion_tokens\{.*\} \S+$", re.MULTILINE)
REQUESTS = re.compile(r"^(?:nv_inference_request_(?:success|failure)|kimi_\w+)\{.*\} \S+$", re.MULTILINE)


def reload_model(http_url: str, header: tuple[str, str], model: str, timeout_s: float) -> float:
    """Unload, then load; returns when the model answers again, with the seconds that unloading took.

    Raises Unavailable.
    """
    times = [time.monotonic()]
    for action in ("unload", "load"):
        url = f"http://{http_url}/v2/repository/models/{model}/{action}"
        request = urllib.request.Request(url, b"{}", dict([header]))
        try:
            urllib.request.urlopen(request, timeout=timeout_s).close()
        except urllib.error.HTTPError as exc:
            raise Unavailable(f"{action} of {model}: {exc.read().decode(errors='replace')[:500]}") from exc
        except OSError as exc:
            raise Unavailable(f"{action} of {model}: {exc}") from exc
        times.append(time.monotonic())
    return times[1] - times[0]


def work_done(metrics_url: str, model: str) -> frozenset[str]:
    """The model's time series; they differ from those of a moment ago when it has got on with its work.

    Triton counts a request of the language model as done when it has been taken in, so only its tokens tell.
    """
    metric = TOKENS if model == "llm" else REQUESTS
    try:
        with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=2) as response:
            text = response.read().decode(errors="replace")
    except OSError:
        return frozenset()
    return frozenset(match[0] for match in metric.finditer(text) if f'model="{model}"' in match[0])
