"""A gateway with one prefill and one decode stub, all in this process."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from stub_instance import StubInstance

from serving_plugin.control.gateway import Gateway, start_app
from serving_plugin.control.settings import GatewaySettings
from serving_plugin.core.types import Role


class Cluster:
    """The gateway under test, its stubs by id, and a client session."""

    def __init__(self) -> None:
        self.instances: dict[str, StubInstance] = {}

    async def start(self, **settings) -> None:
        self.gateway = Gateway(GatewaySettings(port=0xFFFF, broadcast_interval_s=0.02, **settings))
        self.runner = await start_app(self.gateway, port=0)
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.http = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=20))

    async def add(self, instance_id: str, role: Role, **options) -> StubInstance:
        stub = StubInstance(instance_id, role, self.instances, **options)
        await stub.start()
        await stub.dial(self.url)
        await self.until(lambda: any(load.id == instance_id for load in self.gateway.monitor.loads()))
        return stub

    async def stop(self) -> None:
        await self.http.close()
        for stub in self.instances.values():
            await stub.stop()
        await self.runner.cleanup()

    async def until(self, holds, timeout_s: float = 5.0) -> None:
        """Wait until `holds()`; fail when it never does."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, "did not come true"
            await asyncio.sleep(0.005)

    async def complete(self, path: str = "/v1/completions", headers=None, **body) -> tuple[int, dict]:
        """A request that is not streamed: status and JSON."""
        default = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        async with self.http.post(path, json={"model": "m", **default, **body}, headers=headers) as response:
            return response.status, await response.json()

    def record(self):
        """The newest finished request."""
        return self.gateway.table.records(1)[0]


@pytest.fixture
async def bare():
    """A gateway without instances."""
    cluster = Cluster()
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def cluster(bare):
    """1P + 1D."""
    await bare.add("p0", Role.PREFILL)
    await bare.add("d0", Role.DECODE)
    return bare
