"""The gateway's end of the control connections: agents dial in, report, and get broadcasts back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from aiohttp import WSCloseCode, WSMsgType, web

from serving_plugin.control.forecasts import ForecastMonitor
from serving_plugin.control.metrics import GatewayMetrics
from serving_plugin.control.monitor import Monitor
from serving_plugin.control.request_table import RequestTable
from serving_plugin.wire import (
    MAX_MESSAGE_BYTES,
    Hello,
    LoadReport,
    Message,
    TransferReport,
    Welcome,
    WireError,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_HEARTBEAT_S = 5.0
_MAX_REASON_BYTES = 120  # a close frame holds 125 bytes, two of them the code


class AgentDoor:
    """Serves `AGENT_PATH`. Each connection has its own sender, so that one slow agent delays no other."""

    def __init__(
        self,
        monitor: Monitor,
        table: RequestTable,
        metrics: GatewayMetrics,
        forecasts: ForecastMonitor,
        gateway_id: str,
        broadcast_interval_s: float,
    ) -> None:
        self._monitor = monitor
        self._table = table
        self._metrics = metrics
        self._forecasts = forecasts
        self._gateway_id = gateway_id
        self._interval_s = broadcast_interval_s
        self._sockets: set[web.WebSocketResponse] = set()
        self._texts: dict[str, tuple[float, str]] = {}  # by model: when it was made, and the broadcast

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """One agent's connection, from hello to its end."""
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=_HEARTBEAT_S)
        await socket.prepare(request)
        self._sockets.add(socket)
        try:
            await self._serve(socket)
        except WireError as error:
            logger.warning("agent at %s is refused: %s", request.remote, error)
            reason = str(error).encode()[:_MAX_REASON_BYTES]
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=reason.decode(errors="ignore").encode())
        finally:
            self._sockets.discard(socket)
            self._monitor.leave(socket)
        return socket

    async def close(self) -> None:
        """Close every connection; agents dial again when a gateway is back."""
        for socket in list(self._sockets):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(socket.close(code=WSCloseCode.GOING_AWAY), 1.0)

    async def _serve(self, socket: web.WebSocketResponse) -> None:
        try:
            hello = await asyncio.wait_for(_receive(socket), _HELLO_TIMEOUT_S)
        except TimeoutError:
            raise WireError(f"no hello within {_HELLO_TIMEOUT_S:.0f} s") from None
        if hello is None:
            return
        if not isinstance(hello, Hello):
            raise WireError(f"first message is {type(hello).__name__}, needs Hello")
        self._monitor.join(hello, socket)
        await socket.send_str(encode(Welcome(self._gateway_id)))
        sender = asyncio.create_task(self._send_broadcasts(socket, hello.model))
        try:
            while (message := await _receive(socket)) is not None:
                self._take(message, socket)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    def _take(self, message: Message, socket: web.WebSocketResponse) -> None:
        if isinstance(message, LoadReport):
            self._monitor.report(message, socket, time.monotonic())
        elif isinstance(message, TransferReport):
            # Every gateway hears of every transfer: only the one that served the request counts it.
            if self._table.set_transfer(message.request_id, message.transfer_start_s, message.transfer_end_s):
                self._metrics.count_transfer(message.num_remote_tokens)
        else:
            raise WireError(f"{type(message).__name__} after hello, needs LoadReport or TransferReport")

    async def _send_broadcasts(self, socket: web.WebSocketResponse, model: str) -> None:
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                await asyncio.wait_for(socket.send_str(self._broadcast_text(model)), _SEND_TIMEOUT_S)
        except (TimeoutError, ConnectionError) as error:
            logger.warning("an agent takes no broadcasts (%r): its connection is closed", error)
            await socket.close()

    def _broadcast_text(self, model: str) -> str:
        """The broadcast of this interval, encoded once for all agents of a model."""
        now_s = time.monotonic()
        made_s, text = self._texts.get(model, (float("-inf"), ""))
        if now_s - made_s > self._interval_s / 2:
            broadcast = self._monitor.broadcast(
                model, time.time(), self._table.recent_lengths_tokens, self._forecasts.is_trusted
            )
            text = encode(broadcast)
            self._texts[model] = (now_s, text)
        return text


async def _receive(socket: web.WebSocketResponse) -> Message | None:
    """Next message, None at the end of the connection."""
    raw = await socket.receive()
    if raw.type is WSMsgType.TEXT:
        return decode(raw.data)
    if raw.type is WSMsgType.BINARY:
        raise WireError("binary message, needs JSON text")
    return None
