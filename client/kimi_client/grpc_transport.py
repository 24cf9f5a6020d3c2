# SPDX-License-Identifier: Apache-2.0
"""The KServe protocol over gRPC, by tritonclient's asyncio client (which lifts the message size limit to 2 GiB)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc.aio import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from kimi_client.endpoint import Endpoint, TlsFiles
from kimi_client.errors import ServerError, from_status
from kimi_client.request import InferRequest
from kimi_client.shared_memory import Region, SharedInputs
from kimi_client.tensors import Outputs, to_array
from kimi_client.transport import Health


class GrpcTransport:
    """Speaks to the decoupled models by the streaming call and to the others by the unary one."""

    def __init__(self, endpoint: Endpoint, *, headers: Mapping[str, str], tls: TlsFiles, shared_memory: bool) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._headers = {name.lower(): value for name, value in headers.items()}
        self._shared = SharedInputs(self._register, self._unregister, enabled=shared_memory)

    @cached_property
    def _client(self) -> InferenceServerClient:
        # Made at the first call, because a channel belongs to the event loop that is running then.
        files = (self._tls.ca_file, self._tls.key_file, self._tls.cert_file)
        ca_file, key_file, cert_file = (None if file is None else str(file) for file in files)
        return InferenceServerClient(
            self._endpoint.address,
            ssl=self._endpoint.is_secure,
            root_certificates=ca_file,
            private_key=key_file,
            certificate_chain=cert_file,
        )

    async def infer(self, request: InferRequest) -> Outputs:
        async with self._shared.share(request.inputs) as regions:
            with _translated():
                result = await self._client.infer(**_call(request, regions), headers=self._headers)
        return _outputs(result.get_response())

    async def complete(self, request: InferRequest) -> Outputs:
        responses = [outputs async for outputs in self.stream(request)]
        if len(responses) != 1:
            raise ServerError(f"expected one response to request {request.request_id}, got {len(responses)}")
        return responses[0]

    async def stream(self, request: InferRequest) -> AsyncGenerator[Outputs, None]:
        async with self._shared.share(request.inputs) as regions:
            # Triton's header `triton_grpc_error` would give a failed stream its status code, but kills a server of 2.51
            # (signal 11) that has seen a cancelled stream before.
            call = self._client.stream_infer(_once(_call(request, regions)), headers=self._headers)
            try:
                with _translated():
                    failure = None
                    # An error does not end the reading: Triton 2.51 keeps 8 KB for ever of a stream that is cancelled.
                    async for result, error in call:
                        if error is not None:
                            failure = error
                            continue
                        response = result.get_response()
                        if response.outputs:  # an empty final response may follow the last data
                            yield _outputs(response)
                    if failure is not None:
                        raise failure
            finally:
                call.cancel()

    async def health(self, models: Sequence[str]) -> Health:
        with _translated():
            is_live = await self._client.is_server_live(headers=self._headers)
            is_ready = await self._client.is_server_ready(headers=self._headers)
            ready = {name: await self._client.is_model_ready(name, headers=self._headers) for name in models}
            metadata = await self._client.get_server_metadata(headers=self._headers)
        return Health(is_live, is_ready, ready, metadata.version)

    async def close(self) -> None:
        if "_client" in self.__dict__:
            await self._shared.close()
            await self._client.close()

    async def _register(self, region: Region) -> None:
        with _translated():
            await self._client.register_system_shared_memory(
                region.name, region.key, region.byte_size, headers=self._headers
            )

    async def _unregister(self, name: str) -> None:
        with _translated():
            await self._client.unregister_system_shared_memory(name, headers=self._headers)


def _call(request: InferRequest, regions: Mapping[str, Region]) -> dict[str, Any]:
    inputs = [_input(name, elements, regions.get(name)) for name, elements in request.inputs.items()]
    return {"model_name": request.model, "inputs": inputs, "request_id": request.request_id}


def _input(name: str, elements: Sequence[bytes], region: Region | None) -> InferInput:
    tensor = InferInput(name, [len(elements)], "BYTES")
    if region is None:
        tensor.set_data_from_numpy(np.array(elements, dtype=np.object_))
    else:
        tensor.set_shared_memory(region.name, region.byte_size)
    return tensor


async def _once(call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield call


def _outputs(response: Any) -> Outputs:
    raw = response.raw_output_contents
    return {
        output.name: to_array(output.datatype, output.shape, data)
        for output, data in zip(response.outputs, raw, strict=True)
    }


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except InferenceServerException as error:
        raise from_status((error.status() or "").removeprefix("StatusCode."), error.message()) from error
    except grpc.RpcError as error:
        raise from_status(error.code().name, error.details() or "") from error
