# SPDX-License-Identifier: Apache-2.0
"""Large pictures by shared memory, with a real server on this host."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_client import KimiClient, RequestTimeout, shared_memory
from kimi_client.shared_memory import Region

pytestmark = pytest.mark.server

LARGE = np.random.default_rng(0).integers(0, 256, (700, 900, 3), dtype=np.uint8)  # noise: 1.9 MB as PNG
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def shared_regions(live_server: Any) -> list[Any]:
    address = f"http://{live_server.http_url}/v2/systemsharedmemory/status"
    with urllib.request.urlopen(address, timeout=10) as response:
        regions: list[Any] = json.load(response)
    return regions


def test_shared_memory_gives_the_same_answer_and_leaves_nothing(
    live_server: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Region] = []
    write = shared_memory._write

    def noted(elements: Any) -> Any:
        region, segment = write(elements)
        written.append(region)
        return region, segment

    monkeypatch.setattr(shared_memory, "_write", noted)
    with KimiClient(url) as plain, KimiClient(url, shared_memory=True) as shared:
        first, second = (client.ask("What?", [LARGE], **GREEDY) for client in (shared, plain))
        assert (first.text, first.reasoning) == (second.text, second.reasoning)
        assert np.array_equal(shared.embed([LARGE])[0], plain.embed([LARGE])[0])
    assert len(written) == (1 if url.startswith("http") else 2)  # `ask` over HTTP carries its pictures itself
    assert shared_regions(live_server) == []
    assert list(Path("/dev/shm").glob(f"kimi_client_{os.getpid()}_*")) == []


def test_g4_an_abandoned_call_gives_its_shared_memory_back(live_server: Any, url: str) -> None:
    with KimiClient(url, shared_memory=True) as shared, pytest.raises(RequestTimeout):
        shared.ask("story", [LARGE], timeout_s=0.05, max_tokens=400)
    assert shared_regions(live_server) == []
