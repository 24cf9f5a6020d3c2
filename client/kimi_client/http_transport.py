# SPDX-License-Identifier: Apache-2.0
"""The KServe protocol over HTTP, by the aiohttp that comes with tritonclient.

tritonclient's own asyncio client has no `generate_stream` and gives every call 60 seconds, streams included.
"""

from __future__ import annotations

import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property

import aiohttp

from kimi_client.endpoint import Endpoint, TlsFiles
from kimi_client.errors import ServerError, from_status
from kimi_client.kserve_http import (
    HEADER_LENGTH,
    EventReader,
    error_text,
    generate_body,
    infer_body,
    parse_event,
    read_generate,
    read_infer,
)
from kimi_client.request import InferRequest
from kimi_client.shared_memory import Region, SharedInputs
from kimi_client.tensors import Outputs
from kimi_client.transport import Health


class HttpTransport:
    """Speaks to `kimi_vl` by `generate` and `generate_stream`, to the unary models by `infer` with binary tensors."""

    def __init__(self, endpoint: Endpoint, *, headers: Mapping[str, str], tls: TlsFiles, shared_memory: bool) -> None:
        self._url = f"{'https' if endpoint.is_secure else 'http'}://{endpoint.address}/v2"
        self._is_secure = endpoint.is_secure
        self._tls = tls
        self._headers = dict(headers)
        self._shared = SharedInputs(self._register, self._unregister, enabled=shared_memory)

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Made at the first call, because a session belongs to the event loop that is running then.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls.ssl_context() if self._is_secure else False),
            timeout=aiohttp.ClientTimeout(total=None),  # the client's own timeouts surround every call
            headers=self._headers,
        )

    async def infer(self, request: InferRequest) -> Outputs:
        async with self._shared.share(request.inputs) as regions:
            body, header_length = infer_body(request, regions)
            headers = {HEADER_LENGTH: str(header_length)}
            async with self._post(f"models/{request.model}/infer", body, headers) as response:
                return read_infer(await response.read(), int(response.headers[HEADER_LENGTH]))

    async def complete(self, request: InferRequest) -> Outputs:
        # The unary twin could be called by `infer`, without base64 and by shared memory. But Triton 2.51 loses about
        # 4 KiB for good with each such call of a model that answers later, and one hop is saved.
        async with self._post(f"models/{request.model}/generate", generate_body(request)) as response:
            return read_generate(parse_event(await response.read()))

    async def stream(self, request: InferRequest) -> AsyncGenerator[Outputs, None]:
        reader = EventReader()
        async with self._post(f"models/{request.model}/generate_stream", generate_body(request)) as response:
            async for data in response.content.iter_any():
                for event in reader.feed(data):
                    yield read_generate(event)

    async def health(self, models: Sequence[str]) -> Health:
        is_live = await self._is_ok("health/live")
        is_ready = await self._is_ok("health/ready")
        ready = {name: await self._is_ok(f"models/{name}/ready") for name in models}
        with _translated():
            async with self._session.get(self._url) as response:
                version = parse_event(await response.read())["version"]
        return Health(is_live, is_ready, ready, version)

    async def close(self) -> None:
        if "_session" in self.__dict__:
            await self._shared.close()
            await self._session.close()

    @asynccontextmanager
    async def _post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        with _translated():
            async with self._session.post(f"{self._url}/{path}", data=io.BytesIO(body), headers=headers) as response:
                if response.status != 200:
                    raise from_status(str(response.status), error_text(await response.read()))
                yield response

    async def _is_ok(self, path: str) -> bool:
        with _translated():
            async with self._session.get(f"{self._url}/{path}") as response:
                return response.status == 200

    async def _register(self, region: Region) -> None:
        place = json.dumps({"key": region.key, "offset": 0, "byte_size": region.byte_size}).encode()
        async with self._post(f"systemsharedmemory/region/{region.name}/register", place):
            pass

    async def _unregister(self, name: str) -> None:
        async with self._post(f"systemsharedmemory/region/{name}/unregister", b""):
            pass


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except aiohttp.ClientError as error:
        raise from_status("UNAVAILABLE", f"{error}") from error
    except (KeyError, ValueError) as error:
        raise ServerError(f"the response is not one of Triton's: {error!r}") from error
