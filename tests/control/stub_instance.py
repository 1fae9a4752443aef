"""In-process stand-ins for prefill and decode instances: they speak the leg contract and the agents' connection."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from serving_plugin.core.types import InstanceLoad, InstanceState, Role
from serving_plugin.wire import (
    AGENT_PATH,
    DISPATCH_PATH,
    LEG_HEADER,
    RELINQUISH_HEADER,
    WIRE_VERSION,
    Hello,
    LoadReport,
    TransferReport,
    decode,
    encode,
)

REPORT_INTERVAL_S = 0.02


def make_load(instance_id="p0", role=Role.PREFILL, **changes) -> InstanceLoad:
    load = InstanceLoad(
        id=instance_id,
        incarnation="a",
        role=role,
        role_epoch=0,
        state=InstanceState.READY,
        sequence=1,
        num_waiting=0,
        num_loading=0,
        num_running=0,
        num_waiting_prompt_tokens=0,
        num_vetoed_tokens=0,
        num_total_blocks=100,
        num_free_blocks=100,
        num_pinned_blocks=0,
        block_size_tokens=32,
        num_heavy_decodes=0,
        num_light_decodes=0,
        busy_fraction=0.0,
    )
    return dataclasses.replace(load, **changes)


def make_hello(instance_id="p0", role=Role.PREFILL, **changes) -> Hello:
    hello = Hello(WIRE_VERSION, instance_id, "a", "http://127.0.0.1:1", "m", "fp", role, 0, "predictor/1")
    return dataclasses.replace(hello, **changes)


@dataclass
class Leg:
    """A request as the stub received it."""

    kind: str
    path: str
    body: dict
    headers: Mapping[str, str]


@dataclass
class StubInstance:
    """One instance. `answer` replaces the stub's own behaviour; `aborted` is set when a caller hangs up.

    It gives the first `num_to_relinquish` decode legs back, of those that may be. `redispatch` replaces the choice of
    another decode instance for such a leg; `redispatched` are the bodies that came for it.
    """

    instance_id: str
    role: Role
    cluster: dict[str, StubInstance]
    model: str = "m"
    kv_fingerprint: str = "fp"
    predictor: str | None = "length-predictor/3"
    answer: object = None
    keepalive_s: float = 75.0
    tokens: tuple[str, ...] = ("a", "b", "c")
    summaries: object = None  # of a prefill leg's answer; None: as an instance without a predictor
    num_to_relinquish: int = 0
    redispatch: object = None
    redispatched: list[dict] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    broadcasts: list = field(default_factory=list)
    transfers: list[TransferReport] = field(default_factory=list)
    close_reason: str | None = None

    def __post_init__(self) -> None:
        self.load = make_load(self.instance_id, self.role)
        self.aborted = asyncio.Event()
        self.url = ""
        self._agent: asyncio.Task | None = None
        self.cluster[self.instance_id] = self

    async def start(self, port: int = 0, routes: Sequence[web.RouteDef] = ()) -> None:
        app = web.Application()
        app.add_routes(routes)
        app.router.add_post(DISPATCH_PATH, self._redispatch)
        app.router.add_post("/{tail:.*}", self._serve)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, keepalive_timeout=self.keepalive_s, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def dial(self, gateway_url: str) -> None:
        self._agent = asyncio.create_task(self._be_agent(gateway_url))

    async def hang_up(self) -> None:
        """End the control connection, as a killed process does."""
        if self._agent is not None:
            self._agent.cancel()
            await asyncio.gather(self._agent, return_exceptions=True)

    async def stop(self) -> None:
        await self.hang_up()
        await self._runner.cleanup()

    async def _be_agent(self, gateway_url: str) -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(gateway_url + AGENT_PATH) as socket:
            hello = make_hello(
                self.instance_id,
                self.role,
                url=self.url,
                model=self.model,
                kv_fingerprint=self.kv_fingerprint,
                predictor=self.predictor,
            )
            await socket.send_str(encode(hello))
            reporter = asyncio.create_task(self._report(socket))
            async for message in socket:
                self.broadcasts.append(decode(message.data))
            reporter.cancel()
            self.close_reason = f"{socket.close_code}"

    async def _report(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                self.load = dataclasses.replace(self.load, sequence=self.load.sequence + 1)
                await socket.send_str(encode(LoadReport(self.load, time.time())))
                while self.transfers:
                    await socket.send_str(encode(self.transfers.pop()))
                await asyncio.sleep(REPORT_INTERVAL_S)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "max_model_len": 2048}]})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        leg = Leg(request.headers.get(LEG_HEADER), request.path, await request.json(), request.headers)
        self.legs.append(leg)
        try:
            if self.answer is not None:
                return await self.answer(self, request, leg)
            if leg.kind == "decode" and self.num_to_relinquish > 0 and RELINQUISH_HEADER in leg.headers:
                self.num_to_relinquish -= 1
                return self.give_back()
            return await (self.prefill(leg) if leg.kind == "prefill" else self.generate(request, leg))
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    def give_back(self) -> web.Response:
        """As an instance answers a decode leg that another one has room for."""
        error = {"message": f"instance {self.instance_id} has no room", "type": "ServiceUnavailableError", "code": 503}
        return web.json_response({"error": error}, status=503, headers={RELINQUISH_HEADER: "1"})

    async def _redispatch(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.redispatched.append(body)
        if self.redispatch is not None:
            return await self.redispatch(self, request, body)
        chosen = self._decode_instance(body["exclude"])
        return web.json_response({"decode_id": chosen and chosen.instance_id, "decode_url": chosen and chosen.url})

    def _decode_instance(self, exclude: Sequence[str] = ()) -> StubInstance | None:
        """The first in the cluster."""
        found = (i for i in self.cluster.values() if i.role is Role.DECODE and i.instance_id not in exclude)
        return next(found, None)

    async def prefill(self, leg: Leg, **tetri) -> web.Response:
        decode_instance = self._decode_instance()
        now_s = time.time()
        answer = {
            "request_id": leg.body["kv_transfer_params"]["tetri"]["request_id"],
            "decode_id": decode_instance.instance_id if decode_instance else None,
            "decode_url": decode_instance.url if decode_instance else None,
            "forecast": None,
            "forecast_source": "model",
            "length_range": [0, 200],
            "is_heavy_decode": False,
            "num_prompt_tokens": 7,
            "times": {
                "prefill_start_s": now_s,
                "prefill_end_s": now_s,
                "forecast_ready_s": now_s,
                "dispatch_s": now_s,
            },
            **({} if self.summaries is None else {"summaries": self.summaries}),
            **tetri,
        }
        params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "tetri": answer}
        return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": params})

    async def generate(self, request: web.Request, leg: Leg) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "completion_tokens": len(self.tokens), "total_tokens": 7 + len(self.tokens)}
        if not leg.body.get("stream"):
            choice = {"index": 0, "text": "".join(self.tokens), "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage, "kv_transfer_params": {"secret": 1}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in self.events(leg, usage):
            await response.write(event)
        await response.write_eof()
        return response

    def events(self, leg: Leg, usage: dict | None = None) -> list[bytes]:
        is_chat = leg.path.endswith("chat/completions")
        choices = [{"index": 0, "text": token} for token in self.tokens]
        if is_chat:
            choices = [{"index": 0, "delta": {"content": token}} for token in self.tokens]
            choices.insert(0, {"index": 0, "delta": {"role": "assistant", "content": ""}})
        bodies = [{"choices": [choice]} for choice in choices]
        if (leg.body.get("stream_options") or {}).get("include_usage"):
            bodies.append({"choices": [], "usage": usage})
        return [*(sse(body) for body in bodies), b"data: [DONE]\n\n"]


def sse(body: dict) -> bytes:
    """An event as vLLM writes it: compact JSON."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()
