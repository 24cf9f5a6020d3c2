# SPDX-License-Identifier: Apache-2.0
"""Which engine runs the language model, as the parameters of the step `llm`."""

from __future__ import annotations

from typing import Any

from kimi_triton.errors import ConfigError
from kimi_triton.llm.vllm_urls import parse_urls
from kimi_triton.serve.options import ServeOptions


def choose_engine(model: Any, options: ServeOptions) -> None:
    """Write the engine's parameters into the config of `llm`. Raises ConfigError for options that do not fit."""
    urls = parse_urls(",".join(options.llm_url or ())) if options.llm == "vllm" else ()
    if options.llm_url and options.llm != "vllm":
        raise ConfigError(f"--llm-url is given, but the engine is {options.llm}; say --llm vllm")
    if options.llm_max_running < 1 or options.llm_max_waiting < 0:
        raise ConfigError(
            f"--llm-max-running is {options.llm_max_running} and --llm-max-waiting {options.llm_max_waiting}, "
            "expected at least 1 and 0"
        )
    if options.llm_chunk_ms < 0:
        raise ConfigError(f"--llm-chunk-ms is {options.llm_chunk_ms}, expected 0 or more")
    parameters = {
        "engine": options.llm,
        "vllm_urls": ",".join(urls),
        "vllm_timeout_s": options.llm_timeout_s,
        "vllm_chunk_ms": options.llm_chunk_ms,
        "vllm_start_timeout_s": int(options.start_timeout_s),
        "max_running": options.llm_max_running,
        "max_waiting": options.llm_max_waiting,
    }
    for name, value in parameters.items():
        model.parameters[name].string_value = str(value)
