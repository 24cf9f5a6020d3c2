# SPDX-License-Identifier: Apache-2.0
"""Where the server is and how to speak to it, from one URL."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kimi_client.errors import InvalidRequest

_SCHEMES: dict[str, tuple[Literal["grpc", "http"], bool]] = {
    "grpc": ("grpc", False),
    "grpcs": ("grpc", True),
    "http": ("http", False),
    "https": ("http", True),
}
_PORTS = {"grpc": 8001, "http": 8000}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for `grpcs://` and `https://`; what is left out comes from the system or is not used."""

    ca_file: Path | None = None  # whom to trust, for a server with a private certificate
    cert_file: Path | None = None  # who we are, where the server asks
    key_file: Path | None = None

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context for `https://`; raises OSError for a file that cannot be read."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL: the protocol, `host:port` (for HTTP perhaps with a path behind it), and whether TLS is used."""

    protocol: Literal["grpc", "http"]
    address: str
    is_secure: bool

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read "localhost:8001", "grpc://host", "grpcs://host:443", "http://host:8000" or "https://host/path".

        Without a scheme gRPC is meant, without a port Triton's usual one.
        """
        parts = urlsplit(url if "://" in url else f"grpc://{url}")
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise InvalidRequest(f"expected a URL like localhost:8001 or http://localhost:8000, got {url!r}")
        protocol, is_secure = _SCHEMES[parts.scheme]
        has_port = parts.netloc.rpartition("]")[2].rpartition(":")[2].isdigit()
        netloc = parts.netloc if has_port else f"{parts.netloc.rstrip(':')}:{_PORTS[protocol]}"
        return cls(protocol, netloc + parts.path.rstrip("/"), is_secure)
