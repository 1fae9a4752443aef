"""Asks the predictor's process for forecasts. A late or failed forecast is None: serving goes on with history."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.predictor.conversation import Message

logger = logging.getLogger(__name__)

_INFO_RETRY_S = 1.0


class PredictorClient:
    """One connection, any number of concurrent requests. Belongs to the event loop that made it; `close` ends it."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._info: asyncio.Future[dict[str, Any]] | None = None
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """The service's info, once it answers.

        Raises:
            ConfigurationError: no answer within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        self._info = asyncio.get_running_loop().create_future()
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                # asked again and again: a question put to a service that then restarted is lost
                async with asyncio.timeout(min(left_s, _INFO_RETRY_S)):
                    await self._socket.send(json.dumps({"info": True}).encode())
                    return await asyncio.shield(self._info)
            except TimeoutError:
                continue
        raise ConfigurationError(
            f"length predictor at {self._endpoint} is not ready after {timeout_s:.0f} s; see its log"
        )

    async def forecast(self, request_id: str, messages: Sequence[Message], timeout_s: float) -> LengthForecast | None:
        """The forecast of the reply to a conversation, or None when it is late or the service reports an error."""
        wire_id = f"{request_id}#{next(self._numbers)}"  # a client may use a request id twice
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[wire_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                plain = [{"role": message.role, "content": message.content} for message in messages]
                await self._socket.send(json.dumps({"id": wire_id, "messages": plain}).encode())
                reply = await future
        except TimeoutError:
            logger.warning("request %s: no length forecast within %.3f s", request_id, timeout_s)
            return None
        finally:
            del self._waiting[wire_id]
        if "error" in reply:
            logger.warning("request %s: length predictor failed: %s", request_id, reply["error"])
            return None
        return LengthForecast.from_weights(reply["edges_tokens"], reply["probabilities"])

    async def close(self) -> None:
        """Drop the connection; requests that still wait get None at their timeout. Idempotent."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _read(self) -> None:
        while True:
            reply = json.loads(await self._socket.recv())
            if "info" in reply:
                if self._info is not None and not self._info.done():
                    self._info.set_result(reply["info"])
                continue
            future = self._waiting.get(reply["id"])
            if future is not None and not future.done():  # else it came late, and nobody waits any more
                future.set_result(reply)
