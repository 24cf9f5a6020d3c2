# SPDX-License-Identifier: Apache-2.0
"""Light client for a kimi-triton server.

from kimi_client import KimiClient

with KimiClient("localhost:8001") as kimi:
    print(kimi.ask("What is this?", images=["cat.jpg"]))
"""

from kimi_client.aio import AsyncKimiClient, AsyncStream
from kimi_client.answer import Answer, Chunk, Usage
from kimi_client.client import KimiClient, Stream
from kimi_client.endpoint import TlsFiles
from kimi_client.errors import (
    InvalidRequest,
    KimiClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)
from kimi_client.images import ImageLike
from kimi_client.messages import Message, user_message
from kimi_client.request import Options
from kimi_client.transport import Health, Transport

__all__ = [
    "Answer",
    "AsyncKimiClient",
    "AsyncStream",
    "Chunk",
    "Health",
    "ImageLike",
    "InvalidRequest",
    "KimiClient",
    "KimiClientError",
    "Message",
    "Options",
    "RequestCancelled",
    "RequestTimeout",
    "ServerError",
    "ServerUnavailable",
    "Stream",
    "TlsFiles",
    "Transport",
    "Usage",
    "user_message",
]

__version__ = "0.1.0"
