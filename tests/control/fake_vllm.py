"""Stands in for `vllm serve` with our plugin: parses the canonical command line and runs a stub instance from it."""

from __future__ import annotations

import argparse
import asyncio
import json

from aiohttp import web
from stub_instance import StubInstance

from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.types import Role


async def dispatch_by_broadcast(stub, request, leg):
    """As a dispatcher does: the decode instance is one that the gateway's broadcast names."""
    if leg.kind != "prefill":
        return await stub.generate(request, leg)
    for _ in range(500):  # the first one may come before the decode instances have joined
        if named := [(one, load.id) for one in stub.broadcasts for load in loads_of(one)]:
            break
        await asyncio.sleep(0.02)
    broadcast, chosen = named[-1]
    return await stub.prefill(leg, decode_id=chosen, decode_url=broadcast.urls[chosen])


def loads_of(message):
    """Loads of decode instances; the gateway's first message is a welcome and has none."""
    return [load for load in getattr(message, "loads", ()) if load.role is Role.DECODE]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    settings = InstanceSettings.from_dict(arguments.kv_transfer_config["kv_connector_extra_config"])
    stub = StubInstance(settings.instance_id, settings.role, {}, model=arguments.model, answer=dispatch_by_broadcast)
    await stub.start(arguments.port, [web.get("/health", _health)])
    while True:  # an agent dials until its gateway is there
        await stub.dial(settings.gateways[0])
        await asyncio.sleep(0.5)
        if stub.broadcasts:
            break
    await asyncio.sleep(120)


async def _health(request: web.Request) -> web.Response:
    return web.Response()


if __name__ == "__main__":
    asyncio.run(main())
