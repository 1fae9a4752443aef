"""What an instance does with the legs that a gateway sends: an ASGI middleware around vLLM's own routes.

A prefill leg starts the length predictor and the engine at once (parallel mode) or one after the other (sequential,
TetriInfer 3.3.2), and its answer gets the dispatch decision. Other legs and plain requests pass through unchanged, but
for metadata that no gateway sends, which are refused here: the engine would have to make sense of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from serving_plugin.core.forecast import LengthForecast
from serving_plugin.core.types import Role
from serving_plugin.engine.agent import Agent
from serving_plugin.engine.load_feed import unix_now_s
from serving_plugin.predictor.conversation import Message, messages_of
from serving_plugin.wire import (
    COMPLETION_DEFAULT_MAX_TOKENS,
    LEG_HEADER,
    RELINQUISH_HEADER,
    REQUEST_ID_HEADER,
    Leg,
    WireError,
    prefill_ask,
)

logger = logging.getLogger(__name__)

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]

LEG_PATHS = ("/v1/completions", "/v1/chat/completions")
END_TIMEOUT_S = 5.0  # for vLLM's route to end once its request is withdrawn


class LegMiddleware:
    """`agent_of` finds the agent once vLLM has initialised its state; `decode_tokens` turns ids into text."""

    def __init__(
        self,
        app: Any,
        agent_of: Callable[[], Agent],
        decode_tokens: Callable[[list[int]], str],
        max_model_len: Callable[[], int],
    ) -> None:
        self._app = app
        self._agent_of = agent_of
        self._decode_tokens = decode_tokens
        self._max_model_len = max_model_len

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST" or scope.get("path") not in LEG_PATHS:
            await self._app(scope, receive, send)
            return
        leg = _leg_of(scope)
        messages = await _read_messages(receive)
        raw, receive = b"".join(message.get("body", b"") for message in messages), _replay(messages, receive)
        if leg is not Leg.PREFILL and _has_odd_metadata(raw):
            await _refuse(send, 400, "kv_transfer_params.tetri is no object; only a gateway sends one")
            return
        if leg is None:
            await self._app(scope, receive, send)
            return
        agent = self._agent_of()
        if leg is Leg.PREFILL and agent.role is not Role.PREFILL:
            await _refuse(send, 503, f"instance {agent.settings.instance_id} is {agent.role.value} now, not prefill")
            return
        agent.num_legs[leg.value] += 1
        if leg is Leg.PREFILL:
            await self._prefill(agent, scope, raw, receive, send)
        else:
            await self._serve(agent, scope, receive, send)

    async def _serve(self, agent: Agent, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Run vLLM's route, and bound its wait in the engine's queue; nothing is sent before there is a body."""
        request_id = _header(scope, REQUEST_ID_HEADER)
        if request_id is None:  # nothing to withdraw it by
            await self._app(scope, receive, send)
            return
        held, client = _HeldStart(send), _Client(receive)
        serving = asyncio.ensure_future(self._app(scope, client.receive, held.send))
        watch = agent.watch(request_id, _header(scope, RELINQUISH_HEADER) is not None)
        watching = asyncio.ensure_future(watch.run(held.begun))
        try:
            await asyncio.wait([serving, watching], return_when=asyncio.FIRST_COMPLETED)
            if serving.done() or watching.result() is None:
                await serving
                return
            held.is_closed = True
            client.hang_up()
            await _end(serving, held, request_id)
            name = agent.settings.instance_id
            if watching.result():
                message = f"instance {name} has no room for the request, another decode instance has"
                await _refuse(send, 503, message, {RELINQUISH_HEADER: "1"})
            else:
                limit_s = agent.settings.admit.max_wait_s
                message = f"the request waited {limit_s:g} s for room on instance {name} (admit.max_wait_s)"
                await _refuse(send, 429, message, {"Retry-After": "1"})
        finally:
            watching.cancel()
            serving.cancel()

    async def _prefill(
        self, agent: Agent, scope: MutableMapping[str, Any], raw: bytes, receive: Receive, send: Send
    ) -> None:
        body = _json_object(raw) or {}
        try:
            request_id = prefill_ask(_metadata(body)).request_id
        except WireError as error:
            message = f"a prefill leg needs kv_transfer_params.tetri.request_id; only a gateway sends one ({error})"
            await _refuse(send, 400, message)
            return
        forecasting = asyncio.create_task(self._forecast(agent, request_id, body))
        loop = asyncio.get_running_loop()
        arrived_s, timeout_s = loop.time(), agent.settings.prediction.timeout_s
        loop.call_later(timeout_s, lambda: agent.breaker.observe(forecasting.done() and not forecasting.cancelled()))
        deadline_s = arrived_s + agent.breaker.patience_s
        try:
            if agent.settings.prediction.mode == "sequential":
                await asyncio.wait([forecasting], timeout=max(0.0, deadline_s - loop.time()))
            capture = _Capture()
            await self._serve(agent, scope, receive, capture.send)
            if capture.status != 200:
                await capture.pass_on(send)
                return
            # Parallel mode: the forecast is usually here by now; late ones are replaced by history (never a hang).
            await asyncio.wait([forecasting], timeout=max(0.0, deadline_s - loop.time()))
            forecast, forecast_ready_s = _result(forecasting, request_id)
            answer = json.loads(capture.body)
            self._add_decision(agent, body, answer, forecast, forecast_ready_s)
            await capture.pass_on(send, json.dumps(answer).encode())
        finally:
            # Late or not, it is seen to the end of its time: that is how the breaker learns of better days. And asyncio
            # does not log the error of a task that was cancelled, also if it had failed before.
            loop.call_at(arrived_s + timeout_s, forecasting.cancel)

    async def _forecast(
        self, agent: Agent, request_id: str, body: Mapping[str, Any]
    ) -> tuple[LengthForecast | None, float]:
        try:
            messages = conversation_of(body, self._decode_tokens)
        except (AttributeError, KeyError, TypeError) as error:  # a form of prompt that only vLLM understands
            logger.warning("request %s: no text to predict from (%r)", request_id, error)
            return None, unix_now_s()
        return await agent.predict(request_id, messages), unix_now_s()

    def _add_decision(
        self,
        agent: Agent,
        body: Mapping[str, Any],
        answer: dict[str, Any],
        forecast: LengthForecast | None,
        forecast_ready_s: float,
    ) -> None:
        params = answer.get("kv_transfer_params") or {}
        meta = params.get("tetri")
        if meta is None:
            # The connector returned nothing to pull (for instance an engine without blocks for the request).
            answer["kv_transfer_params"] = {
                "tetri": {"decode_id": None, "decode_url": None, "error": "no KV to transfer"}
            }
            return
        max_tokens = meta.get("max_tokens") or (
            COMPLETION_DEFAULT_MAX_TOKENS
            if "messages" not in body
            else max(1, self._max_model_len() - int(meta["num_prompt_tokens"]))
        )
        decision = agent.dispatch(meta, forecast, max_tokens)
        decision["times"]["forecast_ready_s"] = forecast_ready_s if forecast is not None else None
        params["tetri"] = decision


def _result(
    forecasting: asyncio.Task[tuple[LengthForecast | None, float]], request_id: str
) -> tuple[LengthForecast | None, float]:
    """The forecast if it is there; a late or failed one is logged and history takes its place."""
    if not forecasting.done():
        logger.warning("request %s: the length forecast is late; history is used", request_id)
    elif (error := forecasting.exception()) is not None:
        logger.warning("request %s: the length forecast failed (%r); history is used", request_id, error)
    else:
        return forecasting.result()
    return None, unix_now_s()


def conversation_of(body: Mapping[str, Any], decode_tokens: Callable[[list[int]], str]) -> tuple[Message, ...]:
    """The predictor's input: a chat's messages, or a completion's prompt as a user's first message.

    Raises:
        AttributeError, KeyError, TypeError: a form of prompt that only vLLM understands.
    """
    if "messages" in body:
        return messages_of(body["messages"])
    return (Message("user", _prompt_text(body.get("prompt", ""), decode_tokens)),)


def _prompt_text(prompt: Any, decode_tokens: Callable[[list[int]], str]) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        return _prompt_text(prompt[0], decode_tokens)
    return decode_tokens(prompt)


async def _end(serving: asyncio.Future[None], held: _HeldStart, request_id: str) -> None:
    """See the application out whose client is made to hang up.

    vLLM's routes listen for that until their response starts: it is how their own task ends, and the request with it,
    where cancelling the route would leave both behind (vLLM 0.32, `with_cancellation`). From the start on a route ends
    when it is cancelled.
    """
    await asyncio.wait([serving, held.started], timeout=END_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if held.started.done():
        serving.cancel()
        await asyncio.wait([serving], timeout=END_TIMEOUT_S)
    if not serving.done():
        logger.warning("%s was withdrawn, and its route still runs %g s later", request_id, END_TIMEOUT_S)


class _Client:
    """`receive` of the wrapped application: what its client sends, until we hang up in the client's place."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._hung_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hang_up(self) -> None:
        """From now on the client is gone."""
        self._hung_up.set_result(None)

    async def receive(self) -> AsgiMessage:
        """ASGI `receive`."""
        receiving = asyncio.ensure_future(self._receive())
        either: list[asyncio.Future[Any]] = [receiving, self._hung_up]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else {"type": "http.disconnect"}
        finally:
            receiving.cancel()


class _HeldStart:
    """Holds back the start of a response until its first bytes: till then the request can be sent elsewhere.

    Once it is closed, nothing goes out any more.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: AsgiMessage | None = None
        self.is_closed = False
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def send(self, message: AsgiMessage) -> None:
        """ASGI `send` of the wrapped application."""
        if message["type"] == "http.response.start":
            self._start = message
            if not self.started.done():
                self.started.set_result(None)
        if message["type"] == "http.response.start" or self.is_closed:
            return
        if not self.begun.done():
            self.begun.set_result(None)
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
        await self._send(message)


class _Capture:
    """Holds back a response of one body so that it can be changed."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self._headers: list[tuple[bytes, bytes]] = []

    async def send(self, message: AsgiMessage) -> None:
        """ASGI `send` of the wrapped application."""
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    async def pass_on(self, send: Send, body: bytes | None = None) -> None:
        """Send what was captured, with `body` in place of the captured one if given."""
        body = self.body if body is None else body
        headers = [(name, value) for name, value in self._headers if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": self.status or 500, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _leg_of(scope: Mapping[str, Any]) -> Leg | None:
    value = _header(scope, LEG_HEADER)
    return Leg(value) if value in tuple(Leg) else None


def _header(scope: Mapping[str, Any], name: str) -> str | None:
    wanted = name.lower().encode()
    for found, value in scope["headers"]:
        if found.lower() == wanted:
            return str(value.decode("latin-1"))
    return None


async def _read_messages(receive: Receive) -> list[AsgiMessage]:
    """The messages of a whole body, or those before a disconnect, and that."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replay(messages: list[AsgiMessage], receive: Receive) -> Receive:
    """`receive` that gives `messages` once more, then whatever comes (a disconnect)."""
    left = iter(messages)

    async def replaying() -> AsgiMessage:
        return next(left, None) or await receive()

    return replaying


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _metadata(body: Mapping[str, Any]) -> Any:
    params = body.get("kv_transfer_params")
    return params.get("tetri") if isinstance(params, dict) else None


def _has_odd_metadata(raw: bytes) -> bool:
    """Whether there is a "tetri" part that is no object; only a body that names one is parsed for that."""
    if b'"tetri"' not in raw:
        return False
    meta = _metadata(_json_object(raw) or {})
    return meta is not None and not isinstance(meta, dict)


_ERROR_TYPES = {400: "BadRequestError", 401: "UnauthorizedError", 429: "RateLimitError", 503: "ServiceUnavailableError"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """One error in OpenAI's shape, as vLLM 0.32 fills it."""
    return {"error": {"message": message, "type": _ERROR_TYPES[status], "param": param, "code": status}}


async def _refuse(send: Send, status: int, message: str, more_headers: Mapping[str, str] | None = None) -> None:
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in (more_headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
