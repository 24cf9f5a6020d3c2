# SPDX-License-Identifier: Apache-2.0
"""Addresses of vLLM servers, as options spell them. Imports nothing large: commands read it too."""

from __future__ import annotations

from urllib.parse import urlsplit

from kimi_triton.errors import ConfigError


def parse_urls(text: str) -> tuple[str, ...]:
    """Base URLs from a list with commas. Raises ConfigError, naming the one that is none."""
    urls = tuple(url.strip().rstrip("/") for url in text.split(",") if url.strip())
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/v1"):
            raise ConfigError(f"vLLM server {url!r} is no URL like http://host:8000")
    if not urls:
        raise ConfigError("no vLLM server is given; name at least one like http://host:8000")
    if len(set(urls)) < len(urls):
        raise ConfigError(f"a vLLM server is given twice: {', '.join(urls)}")
    return tuple(url.removesuffix("/v1") for url in urls)
