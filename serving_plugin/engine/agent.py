"""The agent of one instance: predicts, dispatches, reports loads. Lives in the instance's API server.

Two threads beside the API server's event loop: one receives snapshots from EngineCore (`load_feed`), one holds a
WebSocket to every configured gateway, so that a busy API server does not look dead. Both hand over whole immutable
values; the event loop reads them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp

from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.drift import summarise
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast, LengthRange
from serving_plugin.core.types import InstanceLoad, InstanceState, RequestInfo, Role
from serving_plugin.engine.breaker import ForecastBreaker
from serving_plugin.engine.dispatcher import Dispatcher
from serving_plugin.engine.load_feed import BusyWindow, EngineSnapshot, LoadReceiver, TransferEvent, unix_now_s
from serving_plugin.engine.predictor_process import PredictorProcess, ShadowPredictor
from serving_plugin.engine.queue_watch import QueueWatch, Withdrawal
from serving_plugin.predictor.conversation import Message
from serving_plugin.wire import (
    AGENT_PATH,
    WIRE_VERSION,
    Hello,
    LoadBroadcast,
    LoadReport,
    TransferReport,
    WireError,
    decode,
    dispatch_ask,
    encode,
)

logger = logging.getLogger(__name__)

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.2, 5.0
FIRST_SNAPSHOT_TIMEOUT_S = 30.0
RELINQUISH_INTERVAL_S = 0.5


class Agent:
    """One per API server. `start` once, then `predict` and `dispatch` per request from the server's event loop."""

    def __init__(
        self, settings: InstanceSettings, engine_id: str, model_names: tuple[str, ...], fingerprint: str
    ) -> None:
        self.settings = settings
        self.role = settings.role
        self.role_epoch = 0
        self.incarnation = uuid.uuid4().hex
        self.dispatcher = Dispatcher(settings.dispatch, settings.forecast)
        self.num_legs = {"prefill": 0, "decode": 0, "whole": 0}
        self.predictor: PredictorProcess | None = None
        self.shadow: ShadowPredictor | None = None
        self.breaker = ForecastBreaker(settings.prediction.timeout_s)
        self.withdraw: Callable[[str, int | None], Awaitable[Withdrawal]] = _nothing_to_withdraw
        self._relinquished_s = float("-inf")
        self._model_names = model_names
        self._fingerprint = fingerprint
        self._snapshot: EngineSnapshot | None = None
        self._busy = BusyWindow()
        self._busy_fraction = 0.0
        self._sequence = 0
        self._is_serving = False
        self._receiver = LoadReceiver(engine_id, self._on_feed)
        self._pending_events: dict[str, list[TransferEvent]] = {gateway: [] for gateway in settings.gateways}
        self._stop_connections: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run_connections, name="tetri-agent", daemon=True)

    async def start(self) -> None:
        """Start the feed, the predictor (prefill instances that name one) and the connections.

        A shadow predictor is started too but not waited for.

        Raises:
            ConfigurationError: the predictor cannot be loaded, or was trained for another target.
        """
        self._receiver.start()
        await self._first_snapshot()
        if self.settings.prediction.model is not None and self.role is Role.PREFILL:
            self.predictor = PredictorProcess(self.settings.prediction, self._model_names[-1])
            info = await self.predictor.start()
            logger.info("length predictor: %s", info)
        if self.settings.prediction.shadow_model is not None and self.role is Role.PREFILL:
            self.shadow = ShadowPredictor(self.settings.prediction, self._model_names[-1])
            self.shadow.start()
        self._thread.start()

    async def _first_snapshot(self) -> None:
        deadline_s = time.monotonic() + FIRST_SNAPSHOT_TIMEOUT_S
        while self._snapshot is None:
            if time.monotonic() > deadline_s:
                raise ConfigurationError(
                    f"no load snapshot from EngineCore within {FIRST_SNAPSHOT_TIMEOUT_S:.0f} s: "
                    f"is --scheduler-cls serving_plugin.engine.scheduler.make_scheduler on the command line?"
                )
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Stop threads and the predictor within a bound."""
        self._receiver.close()
        if self.predictor is not None:
            self.predictor.close()
        if self.shadow is not None:
            self.shadow.close()
        if self._thread.is_alive():
            self._stop_connections()
            self._thread.join(timeout=3.0)

    # Per request

    async def predict(self, request_id: str, messages: Sequence[Message]) -> LengthForecast | None:
        """The model's forecast, or None if there is no predictor or it fails. The caller bounds its wait."""
        if self.shadow is not None:
            self.shadow.ask(request_id, messages)
        if self.predictor is None:
            return None
        return await self.predictor.forecast(request_id, messages)

    def dispatch(self, meta: Mapping[str, Any], forecast: LengthForecast | None, max_tokens: int) -> dict[str, Any]:
        """The "tetri" part of a prefill leg's answer: decode instance, forecast and range in force, times.

        `summaries` tell the gateway what the models themselves said, also while history is in force.
        """
        summaries = self._summaries(str(meta["request_id"]), forecast, max_tokens)
        in_force, source, length_range, is_heavy = self.dispatcher.classify(forecast, max_tokens)
        now_s = unix_now_s()
        request = RequestInfo(
            id=str(meta["request_id"]),
            arrival_s=float(meta.get("arrival_s") or now_s),
            num_prompt_tokens=int(meta["num_prompt_tokens"]),
            max_tokens=max_tokens,
            forecast=in_force,
            length_range=length_range,
            is_heavy_decode=is_heavy,
        )
        chosen = self.dispatcher.choose(request, exclude=frozenset(map(str, meta.get("exclude") or ())))
        decode_id, decode_url = chosen or (None, None)
        can_ever_fit = chosen is not None or self.dispatcher.can_ever_fit(request)
        return {
            "request_id": meta["request_id"],
            "incarnation": self.incarnation,
            "num_prompt_tokens": meta["num_prompt_tokens"],
            "decode_id": decode_id,
            "decode_url": decode_url,
            "error": None if chosen else _why_undecided(request, can_ever_fit),
            "can_ever_fit": can_ever_fit,
            "max_tokens": max_tokens,
            "forecast": {"edges_tokens": list(in_force.edges_tokens), "probabilities": list(in_force.probabilities)},
            "forecast_source": source,
            "length_range": [length_range.low_tokens, length_range.high_tokens],
            "is_heavy_decode": is_heavy,
            "summaries": summaries,
            "times": {
                "prefill_start_s": meta.get("prefill_start_s"),
                "prefill_end_s": meta.get("prefill_end_s"),
                "dispatch_s": now_s,
            },
        }

    def redispatch(self, body: object) -> dict[str, Any]:
        """Another decode instance for a request that one has relinquished: `{"decode_id", "decode_url"}`, or nulls.

        `body`: "tetri", our decision of before, and "exclude", ids of instances that shall not have it.

        Raises:
            WireError: `body` is nothing of the kind.
        """
        ask = dispatch_ask(body)
        request = RequestInfo(
            id=ask.request_id,
            arrival_s=unix_now_s(),
            num_prompt_tokens=ask.num_prompt_tokens,
            max_tokens=ask.max_tokens,
            length_range=LengthRange(*ask.length_range),
            is_heavy_decode=ask.is_heavy_decode,
        )
        decode_id, decode_url = self.dispatcher.choose(request, frozenset(ask.exclude)) or (None, None)
        return {"decode_id": decode_id, "decode_url": decode_url}

    def watch(self, request_id: str, may_relinquish: bool) -> QueueWatch:
        """The bound on a leg's wait in this instance's queue."""
        return QueueWatch(
            self.settings.admit,
            may_relinquish,
            lambda: self.dispatcher.room_elsewhere_tokens(self.settings.instance_id),
            partial(self._withdraw_once, request_id),
        )

    async def _withdraw_once(self, request_id: str, room_tokens: int | None) -> Withdrawal:
        """One relinquished request per `RELINQUISH_INTERVAL_S`: the others must have seen the room that it takes."""
        if room_tokens is None:
            return await self.withdraw(request_id, None)
        now_s, before_s = time.monotonic(), self._relinquished_s
        if now_s - before_s < RELINQUISH_INTERVAL_S:
            return Withdrawal.WAITS_ON
        self._relinquished_s = now_s  # the engine may take a step to answer: nobody else asks meanwhile
        result = Withdrawal.NOT_WAITING
        try:
            result = await self.withdraw(request_id, room_tokens)
        finally:
            if result is not Withdrawal.DONE and self._relinquished_s == now_s:  # no room taken: the next one's turn
                self._relinquished_s = before_s
        return result

    def _summaries(self, request_id: str, forecast: LengthForecast | None, max_tokens: int) -> list[dict[str, Any]]:
        """The champion's forecast and, if it is there by now, the shadow's."""
        coverage = self.settings.forecast.coverage
        summaries = []
        if forecast is not None and self.predictor is not None:
            summaries.append(summarise(forecast, self.predictor.model_name, coverage, max_tokens))
        shadow_forecast = self.shadow.take(request_id) if self.shadow is not None else None
        if shadow_forecast is not None and self.shadow is not None:
            summaries.append(summarise(shadow_forecast, self.shadow.model_name, coverage, max_tokens, is_shadow=True))
        return [summary.to_dict() for summary in summaries]

    def status(self) -> dict[str, Any]:
        """What the instance says of itself at `/tetri/instance`."""
        return {
            "instance_id": self.settings.instance_id,
            "incarnation": self.incarnation,
            "role": self.role.value,
            "role_epoch": self.role_epoch,
            "legs": dict(self.num_legs),
            "predictor": self.predictor.info if self.predictor else None,
            "shadow": self.shadow.status() if self.shadow else None,
            "waits_for_forecasts": not self.breaker.is_open,
            "distrusting_gateways": list(self.dispatcher.distrusting_gateways),
            "load": None if self._snapshot is None else dict(_load_fields(self._snapshot)),
        }

    # Feed thread

    def _on_feed(self, snapshot: EngineSnapshot, events: list[TransferEvent]) -> None:
        self._busy_fraction = self._busy.update(snapshot, time.monotonic(), self.role is Role.PREFILL)
        self._snapshot = snapshot
        for pending in self._pending_events.values():
            pending += events
            del pending[:-4096]

    # Connection thread

    def _run_connections(self) -> None:
        asyncio.run(self._hold_connections())

    async def _hold_connections(self) -> None:
        stopped = asyncio.Event()
        self._stop_connections = partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set)
        timeout = aiohttp.ClientTimeout(total=None, connect=5, sock_connect=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            tasks = [asyncio.create_task(self._hold(session, gateway)) for gateway in self.settings.gateways]
            tasks.append(asyncio.create_task(self._watch_own_server(session)))
            await stopped.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_own_server(self, session: aiohttp.ClientSession) -> None:
        """READY only once our own API server answers: plugins start before it listens."""
        while not self._is_serving:
            try:
                async with session.get(
                    f"{self.settings.url}/health", timeout=aiohttp.ClientTimeout(total=2)
                ) as response:
                    self._is_serving = response.status == 200
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.1)
        logger.info("instance %s serves as %s", self.settings.instance_id, self.role.value)

    async def _hold(self, session: aiohttp.ClientSession, gateway: str) -> None:
        """Keep one connection to `gateway`, for ever, with growing pauses between attempts."""
        pause_s = RECONNECT_MIN_S
        while True:
            try:
                async with session.ws_connect(f"{gateway}{AGENT_PATH}", heartbeat=5.0) as socket:
                    await socket.send_str(encode(self._hello()))
                    pause_s = RECONNECT_MIN_S
                    await self._talk(socket, gateway)
            except (aiohttp.ClientError, OSError, TimeoutError, WireError) as error:
                logger.warning(
                    "gateway %s: %s; trying again in %.1f s", gateway, error or type(error).__name__, pause_s
                )
            await asyncio.sleep(pause_s)
            pause_s = min(RECONNECT_MAX_S, pause_s * 2)

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse, gateway: str) -> None:
        """Report and listen until either ends: a connection that does only one of them is dialled again."""
        halves = [
            asyncio.create_task(self._report(socket, gateway)),
            asyncio.create_task(self._listen(socket, gateway)),
        ]
        try:
            done, _ = await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            for half in done:
                half.result()
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            self._set_trust(gateway, True)  # a gateway that is gone has no say

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse, gateway: str) -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            received = decode(message.data)
            if isinstance(received, LoadBroadcast):
                self.dispatcher.update(received.loads, received.urls)
                self.dispatcher.update_history(received.recent_lengths_tokens)
                self._set_trust(gateway, received.is_forecast_trusted)

    def _set_trust(self, gateway: str, is_trusted: bool) -> None:
        before = self.dispatcher.distrusting_gateways
        self.dispatcher.update_trust(gateway, is_trusted)
        after = self.dispatcher.distrusting_gateways
        if bool(before) != bool(after):
            logger.warning(
                "length ranges come from %s", f"history: drift at {', '.join(after)}" if after else "the model"
            )

    async def _report(self, socket: aiohttp.ClientWebSocketResponse, gateway: str) -> None:
        while True:
            load = self._load()
            if load is not None:
                await socket.send_str(encode(LoadReport(load, unix_now_s())))
            pending = self._pending_events[gateway]
            while pending:
                event = pending.pop(0)
                await socket.send_str(
                    encode(
                        TransferReport(
                            event.request_id, event.transfer_start_s, event.transfer_end_s, event.num_remote_tokens
                        )
                    )
                )
            await asyncio.sleep(self.settings.report_interval_s)

    def _hello(self) -> Hello:
        return Hello(
            version=WIRE_VERSION,
            instance_id=self.settings.instance_id,
            incarnation=self.incarnation,
            url=self.settings.url,
            model=self._model_names[0],
            kv_fingerprint=self._fingerprint,
            role=self.role,
            role_epoch=self.role_epoch,
            predictor=self.predictor.description if self.predictor else None,
        )

    def _load(self) -> InstanceLoad | None:
        snapshot = self._snapshot
        if snapshot is None:
            return None
        self._sequence += 1
        return InstanceLoad(
            id=self.settings.instance_id,
            incarnation=self.incarnation,
            role=self.role,
            role_epoch=self.role_epoch,
            state=InstanceState.READY if self._is_serving else InstanceState.STARTING,
            sequence=self._sequence,
            busy_fraction=self._busy_fraction,
            **_load_fields(snapshot),
        )


async def _nothing_to_withdraw(request_id: str, room_tokens: int | None) -> Withdrawal:
    return Withdrawal.NOT_WAITING


def _why_undecided(request: RequestInfo, can_ever_fit: bool) -> str:
    if can_ever_fit:
        return "no READY decode instance is known to the prefill instance"
    return (
        f"{request.num_prompt_tokens} prompt tokens and up to {request.max_tokens} output tokens fit no decode "
        "instance's KV cache: ask for fewer, or give the instances more memory"
    )


def _load_fields(snapshot: EngineSnapshot) -> dict[str, Any]:
    return {
        name: getattr(snapshot, name)
        for name in EngineSnapshot.__dataclass_fields__
        if name not in ("prefill_busy_s", "decode_busy")
    }
