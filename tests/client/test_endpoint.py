# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kimi_client import InvalidRequest
from kimi_client.endpoint import Endpoint


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8001", ("grpc", "localhost:8001", False)),
        ("localhost", ("grpc", "localhost:8001", False)),
        ("grpc://10.0.0.1:9", ("grpc", "10.0.0.1:9", False)),
        ("grpcs://kimi.example:443", ("grpc", "kimi.example:443", True)),
        ("http://localhost", ("http", "localhost:8000", False)),
        ("https://kimi.example/triton/", ("http", "kimi.example:8000/triton", True)),
        ("[::1]:8001", ("grpc", "[::1]:8001", False)),
        ("http://[::1]", ("http", "[::1]:8000", False)),
    ],
)
def test_urls(url: str, expected: tuple[str, str, bool]) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.protocol, endpoint.address, endpoint.is_secure) == expected


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "grpc://:8001"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a URL like"):
        Endpoint.parse(url)
