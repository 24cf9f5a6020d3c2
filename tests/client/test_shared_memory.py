# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from kimi_client import ServerError
from kimi_client.shared_memory import FROM_BYTES, Region, SharedInputs
from kimi_client.tensors import unpack_bytes

LARGE = [b"x" * FROM_BYTES, b"y"]


class Server:
    """Knows the regions it was told of and reads them as Triton does, by their key."""

    def __init__(self) -> None:
        self.regions: dict[str, int] = {}
        self.in_use = False

    async def register(self, region: Region) -> None:
        self.regions[region.name] = region.byte_size

    async def unregister(self, name: str) -> None:
        if self.in_use:
            raise ServerError("it is currently in use")
        del self.regions[name]


def segment_exists(name: str) -> bool:
    return Path("/dev/shm", name).exists()


def test_large_inputs_go_to_shared_memory_and_leave_nothing_behind() -> None:
    server = Server()
    shared = SharedInputs(server.register, server.unregister, enabled=True)

    async def call() -> None:
        async with shared.share({"text_input": [b"hi"], "image": LARGE}) as regions:
            assert list(regions) == ["image"]
            region = regions["image"]
            assert server.regions == {region.name: region.byte_size}
            segment = SharedMemory(region.name)
            assert segment.buf is not None
            assert unpack_bytes(bytes(segment.buf[: region.byte_size])) == LARGE
            segment.close()
            name = region.name
        assert server.regions == {}
        assert not segment_exists(name)

    asyncio.run(call())


def test_nothing_is_shared_unless_it_is_switched_on() -> None:
    server = Server()

    async def call() -> None:
        async with SharedInputs(server.register, server.unregister, enabled=False).share({"image": LARGE}) as regions:
            assert regions == {}

    asyncio.run(call())


def test_a_region_still_being_read_is_withdrawn_later() -> None:
    server = Server()
    shared = SharedInputs(server.register, server.unregister, enabled=True)

    async def call() -> None:
        server.in_use = True
        async with shared.share({"image": LARGE}) as regions:
            name = regions["image"].name
        assert list(server.regions) == [name]
        assert not segment_exists(name)  # the server has mapped it, its name is no longer needed
        asyncio.get_running_loop().call_later(0.15, lambda: setattr(server, "in_use", False))
        await shared.close()
        assert server.regions == {}

    asyncio.run(call())


def test_a_server_elsewhere_refuses_and_nothing_is_left_behind() -> None:
    names: list[str] = []

    async def refuse(region: Region) -> None:
        names.append(region.name)
        raise ServerError("unable to open shared memory region")

    server = Server()

    async def call() -> None:
        async with SharedInputs(refuse, server.unregister, enabled=True).share({"image": LARGE}):
            pass

    with pytest.raises(ServerError, match="unable to open"):
        asyncio.run(call())
    assert not segment_exists(names[0])
