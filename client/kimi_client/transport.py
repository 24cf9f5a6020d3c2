# SPDX-License-Identifier: Apache-2.0
"""What the client needs from a protocol. Two implementations speak it; tests inject a third."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kimi_client.endpoint import Endpoint, TlsFiles
from kimi_client.request import InferRequest
from kimi_client.tensors import Outputs


@dataclass(frozen=True, slots=True)
class Health:
    """The server's own word about itself. `models` tells which of the public models take requests."""

    is_live: bool
    is_ready: bool
    models: Mapping[str, bool]
    server_version: str


class Transport(Protocol):
    """One connection to one server, used from one event loop; raises only classes of `kimi_client.errors`."""

    async def infer(self, request: InferRequest) -> Outputs:
        """Send a request to a unary model and return its response."""
        ...

    async def complete(self, request: InferRequest) -> Outputs:
        """Send a chat request that asked for no streaming and return its only response."""
        ...

    def stream(self, request: InferRequest) -> AsyncGenerator[Outputs, None]:
        """Send a chat request and yield its responses as they come; closing the generator hangs up."""
        ...

    async def health(self, models: Sequence[str]) -> Health:
        """Ask whether the server and the named models are ready."""
        ...

    async def close(self) -> None:
        """Hang up; the transport cannot be used again."""
        ...


def connect(url: str, *, headers: Mapping[str, str], tls: TlsFiles, shared_memory: bool) -> Transport:
    """Return the transport for a URL. Nothing is sent before the first call."""
    endpoint = Endpoint.parse(url)
    # Each protocol's library takes a third of a second to import, so only the one in use is imported.
    if endpoint.protocol == "grpc":
        from kimi_client.grpc_transport import GrpcTransport

        return GrpcTransport(endpoint, headers=headers, tls=tls, shared_memory=shared_memory)
    from kimi_client.http_transport import HttpTransport

    return HttpTransport(endpoint, headers=headers, tls=tls, shared_memory=shared_memory)
