"""The legs' middleware around a stand-in for vLLM's application: dispatch is added, everything else is untouched."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
from fake_clock import now_s, run
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serving_plugin.core.config import AdmitSettings, InstanceSettings, PredictionSettings
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.core.types import Role
from serving_plugin.engine.breaker import MAX_LATE_IN_A_ROW, ForecastBreaker
from serving_plugin.engine.legs import END_TIMEOUT_S, LegMiddleware, conversation_of
from serving_plugin.engine.queue_watch import QueueWatch, Withdrawal
from serving_plugin.predictor.conversation import Message

FORECAST = LengthForecast((0, 200, 400), (0.2, 0.8))
META = {"request_id": "r1", "max_tokens": 50, "arrival_s": 1.0}
BODY = {"model": "m", "prompt": "hello", "kv_transfer_params": {"do_remote_decode": True, "tetri": META}}


class StandInAgent:
    """Answers like `Agent`; `delay_s` is how long its predictor takes.

    `is_waiting`: whether the engine still has every request in its queue; `room_tokens`: what others have room for.
    """

    def __init__(
        self, role: Role = Role.PREFILL, mode: str = "parallel", delay_s: float = 0.0, timeout_s: float = 0.2
    ) -> None:
        prediction = PredictionSettings(mode=mode, timeout_s=timeout_s)
        admit = AdmitSettings(relinquish_after_s=10.0, max_wait_s=60.0)
        self.settings = InstanceSettings(role, "p0", "http://127.0.0.1:1", prediction=prediction, admit=admit)
        self.breaker = ForecastBreaker(timeout_s)
        self.role = role
        self.num_legs = {"prefill": 0, "decode": 0, "whole": 0}
        self.events: list[str] = []
        self.dispatched: list[tuple[LengthForecast | None, int]] = []
        self.delay_s = delay_s
        self.num_predicting = 0
        self.is_waiting = True
        self.room_tokens: int | None = None
        self.withdrawn: list[tuple[str, int | None]] = []
        self.forecast_error: Exception | None = None
        self.withdraw_error: Exception | None = None

    async def predict(self, request_id: str, messages: Sequence[Message]) -> LengthForecast:
        self.num_predicting += 1
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.num_predicting -= 1
        if self.forecast_error is not None:
            raise self.forecast_error
        self.events.append(f"forecast of {messages[-1].content}")
        return FORECAST

    def watch(self, request_id: str, may_relinquish: bool) -> QueueWatch:
        async def withdraw(room_tokens: int | None) -> Withdrawal:
            self.withdrawn.append((request_id, room_tokens))
            if self.withdraw_error is not None:
                raise self.withdraw_error
            return Withdrawal.DONE if self.is_waiting else Withdrawal.NOT_WAITING

        return QueueWatch(self.settings.admit, may_relinquish, lambda: self.room_tokens, withdraw)

    def dispatch(self, meta: Any, forecast: LengthForecast | None, max_tokens: int) -> dict[str, Any]:
        self.dispatched.append((forecast, max_tokens))
        return {"request_id": meta["request_id"], "decode_id": "d0", "times": {}}


async def call(agent: StandInAgent, body: Any, leg: str | None, status: int = 200, raw: bytes | None = None) -> Any:
    """(status, body) of one POST /v1/completions through the middleware; the application echoes what it got."""

    async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        got = json.loads((await receive())["body"])
        await asyncio.sleep(0.01)
        agent.events.append("engine")
        answer = {"id": "x", "kv_transfer_params": {"tetri": {**META, "num_prompt_tokens": 7}}, "got": got}
        encoded = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(encoded)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": encoded[:10], "more_body": True})
        await send({"type": "http.response.body", "body": encoded[10:]})

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode() if raw is None else raw, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if leg is None else [(b"X-Tetri-Leg", leg.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    middleware = LegMiddleware(app, lambda: agent, lambda ids: f"decoded {ids}", lambda: 100)  # type: ignore[arg-type, return-value]
    await middleware(scope, receive, send)
    payload = b"".join(message.get("body", b"") for message in sent)
    lengths = [value for name, value in sent[0]["headers"] if name == b"content-length"]
    assert lengths == [str(len(payload)).encode()]
    return sent[0]["status"], json.loads(payload)


async def test_prefill_leg_gets_the_decision() -> None:
    agent = StandInAgent()
    status, answer = await call(agent, BODY, "prefill")
    assert (status, answer["got"]) == (200, BODY)
    assert answer["kv_transfer_params"]["tetri"]["decode_id"] == "d0"
    assert answer["kv_transfer_params"]["tetri"]["times"]["forecast_ready_s"] > 0
    assert agent.dispatched == [(FORECAST, 50)]
    assert agent.num_legs["prefill"] == 1


@pytest.mark.parametrize(("mode", "first"), [("parallel", "engine"), ("sequential", "forecast of hello")])
async def test_predictor_runs_beside_or_before_the_engine(mode: str, first: str) -> None:
    agent = StandInAgent(mode=mode, delay_s=0.05)
    await call(agent, BODY, "prefill")
    assert agent.events[0] == first
    assert sorted(agent.events) == ["engine", "forecast of hello"]


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
async def test_a_late_forecast_is_not_waited_for_beyond_the_bound(mode: str) -> None:
    agent = StandInAgent(mode=mode, delay_s=30, timeout_s=1.0)
    began_s = time.monotonic()
    async with asyncio.timeout(5):
        status, answer = await call(agent, BODY, "prefill")
    assert status == 200
    assert time.monotonic() - began_s < 1.9  # once, not before prefill and after it again
    assert agent.dispatched == [(None, 50)]
    assert answer["kv_transfer_params"]["tetri"]["times"]["forecast_ready_s"] is None


@pytest.mark.parametrize(
    ("body", "max_tokens"),
    [
        ({**BODY, "kv_transfer_params": {"tetri": {"request_id": "r1"}}}, 50),
        ({"model": "m", "messages": [{"content": "hello"}], "kv_transfer_params": {"tetri": META}}, 50),
    ],
)
async def test_limit_comes_with_the_engine_s_answer(body: Any, max_tokens: int) -> None:
    agent = StandInAgent()
    await call(agent, body, "prefill")
    assert agent.dispatched[0][1] == max_tokens


async def test_a_prompt_without_text_goes_on_without_a_forecast() -> None:
    agent = StandInAgent()
    status, _ = await call(agent, {"messages": [3], "kv_transfer_params": {"tetri": META}}, "prefill")
    assert (status, agent.dispatched) == (200, [(None, 50)])


async def test_an_error_of_the_engine_passes_unchanged() -> None:
    agent = StandInAgent()
    status, answer = await call(agent, BODY, "prefill", status=400)
    assert status == 400
    assert answer["got"] == BODY and agent.dispatched == []


@pytest.mark.parametrize("leg", ["decode", "whole", None, "nonsense"])
async def test_other_requests_pass_untouched(leg: str | None) -> None:
    agent = StandInAgent()
    status, answer = await call(agent, BODY, leg)
    assert (status, answer["got"], agent.dispatched) == (200, BODY, [])


async def test_a_decode_instance_refuses_prefill_legs() -> None:
    status, answer = await call(StandInAgent(Role.DECODE), BODY, "prefill")
    assert status == 503
    assert "is decode now, not prefill" in answer["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 200_000,
        b'{"kv_transfer_params": {"tetri": 3}}',
        b'{"kv_transfer_params": [1]}',
        b'{"prompt": "a"}',
        b'{"kv_transfer_params": {"tetri": {"request_id": "r1", "max_tokens": "x"}}}',
        b'{"kv_transfer_params": {"tetri": {"request_id": "r1", "arrival_s": 1e999}}}',
    ],
)
async def test_a_prefill_leg_without_metadata_is_refused(raw: bytes) -> None:
    agent = StandInAgent()
    status, answer = await call(agent, None, "prefill", raw=raw)
    assert status == 400
    assert "request_id" in answer["error"]["message"]
    assert agent.events == [], "before anything is computed for it"


@pytest.mark.parametrize("leg", ["decode", "whole", None])
@pytest.mark.parametrize("tetri", [1, [1], "x", True])
async def test_metadata_that_are_no_object_never_reach_the_engine(leg: str | None, tetri: Any) -> None:
    agent = StandInAgent(Role.DECODE)
    status, answer = await call(agent, {"prompt": "a", "kv_transfer_params": {"tetri": tetri}}, leg)
    assert (status, answer["error"]["type"], agent.events) == (400, "BadRequestError", [])
    assert "kv_transfer_params.tetri is no object" in answer["error"]["message"]


@pytest.mark.parametrize("leg", ["decode", "whole", None])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": 'say "tetri"'},
        {"prompt": "a", "kv_transfer_params": {"tetri": META}},
        {"prompt": "a", "kv_transfer_params": {"tetri": None}},
        {"prompt": "a", "tetri": 3},
        {"prompt": "a", "kv_transfer_params": "tetri"},
    ],
)
async def test_what_vllm_itself_judges_is_left_to_it(leg: str | None, body: Any) -> None:
    status, answer = await call(StandInAgent(Role.DECODE), body, leg)
    assert (status, answer["got"]) == (200, body)


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"prompt": "a b"}, [("user", "a b")]),
        ({"prompt": ["a b"]}, [("user", "a b")]),
        ({"prompt": [1, 2]}, [("user", "decoded [1, 2]")]),
        ({"prompt": [[1, 2]]}, [("user", "decoded [1, 2]")]),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            [("system", "s"), ("user", "u")],
        ),
        ({"messages": [{"content": [{"text": "u"}, {"type": "image_url"}, {"text": "v"}]}]}, [("user", "u\n\nv")]),
        ({"messages": [{"role": "assistant", "content": None}]}, [("assistant", "")]),
    ],
)
def test_conversation_that_the_predictor_sees(body: Any, messages: list[tuple[str, str]]) -> None:
    seen = conversation_of(body, lambda ids: f"decoded {ids}")
    assert [(message.role, message.content) for message in seen] == messages


# Waits, under a fake clock

ANSWER = json.dumps({"id": "x", "kv_transfer_params": {"tetri": {**META, "num_prompt_tokens": 7}}}).encode()
START = {"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"1")]}
RELINQUISH = (b"X-Tetri-Relinquish", b"1")


class Exchange:
    """One leg through the middleware; `sent` and `sent_s` are what the client got, and when."""

    def __init__(
        self,
        agent: StandInAgent,
        app: Any,
        leg: str = "decode",
        more_headers: Sequence[tuple[bytes, bytes]] = (),
        asgi: str = "2.3",
    ) -> None:
        self.sent: list[Any] = []
        self.sent_s: list[float] = []
        self.disconnected = asyncio.Event()
        self._has_body = True
        headers = [(b"X-Tetri-Leg", leg.encode()), (b"X-Request-Id", b"r1"), *more_headers]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        scope["asgi"] = {"spec_version": asgi}
        middleware = LegMiddleware(app, lambda: agent, str, lambda: 100)  # type: ignore[arg-type, return-value]
        self.task = asyncio.ensure_future(middleware(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._has_body:
            self._has_body = False
            return {"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.sent_s.append(now_s())

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def error(self) -> dict[str, Any]:
        assert [message["type"] for message in self.sent] == ["http.response.start", "http.response.body"]
        assert self.headers[b"content-length"] == str(len(self.sent[1]["body"])).encode()
        return json.loads(self.sent[1]["body"])["error"]  # type: ignore[no-any-return]


async def waiting(events: list[str]) -> None:
    """A request in the engine's queue, for ever; its end takes a second."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(1)
        events.append("application ended")


def queueing(events: list[str], starts: bool = True) -> Any:
    """An application that streams (its headers go out before its first token) or answers as vLLM's routes do."""

    async def app(scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        await receive()
        if starts:
            await send(START)
            await waiting(events)
        await with_cancellation(waiting(events), receive)
        await send(START)
        await send({"type": "http.response.body", "body": b"null"})

    return app


async def with_cancellation(handling: Coroutine[Any, Any, Any], receive: Callable[[], Any]) -> Any:
    """vLLM 0.32's decorator of that name, line by line: cancelled itself, it leaves `handling` running."""

    async def listen_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    handler_task = asyncio.create_task(handling)
    cancellation_task = asyncio.create_task(listen_for_disconnect())
    done, pending = await asyncio.wait([handler_task, cancellation_task], return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return handler_task.result() if handler_task in done else None


def answering(after_s: float) -> Any:
    """An application that answers after so many seconds."""

    async def app(scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        await receive()
        await asyncio.sleep(after_s)
        await send(START)
        await send({"type": "http.response.body", "body": ANSWER})

    return app


@pytest.mark.parametrize("starts", [True, False])
def test_a_relinquished_leg_is_cancelled_and_answered_503_with_the_header(starts: bool) -> None:
    async def scenario() -> None:
        agent = StandInAgent(Role.DECODE)
        agent.room_tokens = 500
        exchange = Exchange(agent, queueing(agent.events, starts), more_headers=[RELINQUISH])
        await asyncio.sleep(9.9)
        assert exchange.sent == [] and agent.events == []
        await exchange.task
        assert agent.withdrawn == [("r1", 500)]
        assert exchange.sent_s == ([11.0] * 2 if starts else [10.0] * 2), "not before the application is gone"
        assert exchange.sent[0]["status"] == 503 and exchange.headers[b"x-tetri-relinquish"] == b"1"
        assert b"x-mine" not in exchange.headers
        error = exchange.error
        assert (error["type"], error["code"], error["param"]) == ("ServiceUnavailableError", 503, None)
        assert "instance p0 has no room" in error["message"]
        await settled(after_s=2)
        assert agent.events == ["application ended"]

    run(scenario())


@pytest.mark.parametrize("leg", ["prefill", "decode", "whole"])
@pytest.mark.parametrize(("stream", "asgi"), [(False, "2.3"), (False, "2.4"), (True, "2.3"), (True, "2.4")])
@pytest.mark.parametrize("relinquished", [False, True])
def test_nothing_is_left_of_a_withdrawn_request(
    leg: str, stream: bool, asgi: str, relinquished: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the task that waits for the engine, nor the prompt that it holds."""

    async def route(request: Request) -> Response:
        await request.json()

        async def tokens() -> AsyncIterator[bytes]:
            try:
                await asyncio.Event().wait()
                yield b"never"
            finally:
                events.append("application ended")

        if stream:
            return StreamingResponse(tokens())
        return JSONResponse(await with_cancellation(waiting(events), request.receive))

    events: list[str] = []
    app = Starlette(routes=[Route("/v1/completions", route, methods=["POST"])])

    async def scenario() -> None:
        agent = StandInAgent()
        agent.room_tokens = 500 if relinquished else None
        exchange = Exchange(agent, app, leg, [RELINQUISH], asgi)
        await exchange.task
        assert exchange.sent[0]["status"] == (503 if relinquished else 429)
        assert exchange.error["code"] == exchange.sent[0]["status"]
        await settled(after_s=3)
        assert events == ["application ended"]

    run(scenario())
    assert caplog.records == []


def test_a_route_that_does_not_end_is_not_waited_for_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()  # it does not even listen

    async def scenario() -> None:
        agent = StandInAgent(Role.DECODE)
        exchange = Exchange(agent, app)
        await exchange.task
        assert exchange.sent[0]["status"] == 429 and exchange.sent_s[0] == 60 + END_TIMEOUT_S
        await settled()

    run(scenario())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "r1 was withdrawn, and its route still runs 5 s later"


@pytest.mark.parametrize("starts", [False, True])
def test_what_a_route_says_or_raises_in_its_end_is_not_heard(starts: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if starts:
            await send(START)
        try:
            await receive()
        finally:
            await send(START)
            await send({"type": "http.response.body", "body": b"late"})
            raise ValueError("in its end")

    async def scenario() -> None:
        unseen: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        exchange = Exchange(StandInAgent(Role.DECODE), app)
        await exchange.task
        assert exchange.sent[0]["status"] == 429 and exchange.error["code"] == 429
        await settled()
        gc.collect()
        assert unseen == []

    run(scenario())
    assert caplog.records == []


def test_an_engine_that_drains_serves_its_requests_on(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM then rejects utility calls: a request that nothing is wrong with must not fail of that."""

    async def scenario() -> None:
        agent = StandInAgent(Role.DECODE)
        agent.room_tokens, agent.withdraw_error = 500, RuntimeError("Server shutting down")
        exchange = Exchange(agent, answering(70), "decode", [RELINQUISH])
        await exchange.task
        assert exchange.sent[0] == START and exchange.sent_s == [70, 70]

    run(scenario())
    assert len([record for record in caplog.records if "Server shutting down" in record.getMessage()]) == 1


@pytest.mark.parametrize("leg", ["prefill", "decode", "whole"])
@pytest.mark.parametrize("starts", [True, False])
def test_a_leg_that_waits_for_max_wait_s_is_cancelled_and_answered_429(leg: str, starts: bool) -> None:
    async def scenario() -> None:
        agent = StandInAgent()
        agent.room_tokens = 500  # of no use without a gateway that says it can bind the leg elsewhere
        exchange = Exchange(agent, queueing(agent.events, starts), leg)
        await asyncio.sleep(59.9)
        assert exchange.sent == []
        await exchange.task
        assert agent.withdrawn == [("r1", None)]
        assert exchange.sent_s == ([61.0] * 2 if starts else [60.0] * 2)
        assert exchange.sent[0]["status"] == 429 and exchange.headers[b"retry-after"] == b"1"
        assert b"x-tetri-relinquish" not in exchange.headers
        error = exchange.error
        assert (error["type"], error["code"], error["param"]) == ("RateLimitError", 429, None)
        assert "waited 60 s for room on instance p0 (admit.max_wait_s)" in error["message"]
        assert agent.dispatched == []
        await settled(after_s=2)
        assert agent.events[-1] == "application ended"

    run(scenario())


@pytest.mark.parametrize("leg", ["prefill", "decode", "whole"])
def test_a_leg_that_the_engine_has_admitted_may_take_as_long_as_it_likes(leg: str) -> None:
    async def scenario() -> None:
        agent = StandInAgent()
        agent.is_waiting, agent.room_tokens = False, 500
        exchange = Exchange(agent, answering(5000), leg, [RELINQUISH])
        await exchange.task
        assert exchange.sent[0]["status"] == 200 and exchange.sent_s[0] == 5000
        assert len(agent.withdrawn) == 1, "asked once, told that it is under way"

    run(scenario())


@pytest.mark.parametrize("leg", ["decode", "whole"])
def test_a_stream_passes_unchanged_with_its_start_held_until_the_first_body(leg: str) -> None:
    bodies = [{"type": "http.response.body", "body": b"data: %d" % i, "more_body": i < 3} for i in range(4)]

    async def app(scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        await send(START)
        for body in bodies:
            await asyncio.sleep(5)  # 2 minutes later a token still goes out: max_wait_s bounds the queue alone
            await send(body)
            await asyncio.sleep(40)

    async def scenario() -> None:
        agent = StandInAgent(Role.DECODE)
        agent.room_tokens = 500
        exchange = Exchange(agent, app, leg, [RELINQUISH])
        await exchange.task
        assert exchange.sent == [START, *bodies]
        assert exchange.sent_s == [5, 5, 50, 95, 140]
        assert agent.withdrawn == []

    run(scenario())


def test_what_is_no_leg_is_not_watched() -> None:
    async def scenario() -> None:
        agent = StandInAgent(Role.DECODE)
        exchange = Exchange(agent, answering(1000), "nonsense")
        await exchange.task
        assert exchange.sent[0] == START and agent.withdrawn == []

    run(scenario())


@pytest.mark.parametrize("leg", ["prefill", "decode", "whole"])
@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_an_application_that_raises_still_raises(leg: str, num_sent: int) -> None:
    messages = [START, {"type": "http.response.body", "body": b"a", "more_body": True}]

    async def app(scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        for message in messages[:num_sent]:
            await send(message)
        await asyncio.sleep(1)
        raise ValueError("the application failed")

    async def scenario() -> None:
        exchange = Exchange(StandInAgent(), app, leg)
        with pytest.raises(ValueError, match="the application failed"):
            await exchange.task
        sent = messages if num_sent == 2 and leg != "prefill" else []
        assert exchange.sent == sent, "a start without a body is no answer: the server makes it a 500"
        await settled()

    run(scenario())


@pytest.mark.parametrize("leg", ["prefill", "decode", "whole"])
def test_a_server_that_gives_up_on_a_leg_cancels_its_application(leg: str) -> None:
    async def scenario() -> None:
        agent = StandInAgent()
        exchange = Exchange(agent, queueing(agent.events), leg)
        await asyncio.sleep(3)
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
        await settled(after_s=2)
        assert agent.events[-1] == "application ended"
        assert (exchange.sent, agent.withdrawn) == ([], [])

    run(scenario())


@pytest.mark.parametrize("leg", ["decode", "whole"])
def test_an_application_sees_that_its_client_hangs_up(leg: str) -> None:
    async def app(scope: Any, receive: Callable[[], Any], send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        await send(START)
        assert (await receive())["type"] == "http.disconnect"  # vLLM then aborts the request and returns

    async def scenario() -> None:
        agent = StandInAgent(Role.DECODE)
        exchange = Exchange(agent, app, leg)
        await asyncio.sleep(3)
        exchange.disconnected.set()
        await exchange.task
        assert (now_s(), exchange.sent, agent.withdrawn) == (3, [], [])
        await settled()

    run(scenario())


async def settled(after_s: float = 0.001) -> None:
    """Nothing of a leg is left running."""
    await asyncio.sleep(after_s)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# Late forecasts, under a fake clock


async def prefill(agent: StandInAgent, engine_s: float = 0.1) -> tuple[float, LengthForecast | None]:
    """(seconds that a prefill leg took, the forecast that it was dispatched with)."""
    started_s = now_s()
    exchange = Exchange(agent, answering(engine_s), "prefill")
    await exchange.task
    assert exchange.sent[0]["status"] == 200
    return round(now_s() - started_s, 6), agent.dispatched[-1][0]


@pytest.mark.parametrize(("mode", "in_time_s"), [("parallel", 0.5), ("sequential", 0.6)])
def test_nobody_waits_for_forecasts_that_keep_coming_late_until_one_is_in_time(mode: str, in_time_s: float) -> None:
    async def scenario() -> None:
        agent = StandInAgent(mode=mode, delay_s=30, timeout_s=2)
        waited_s = 2.0 if mode == "parallel" else 2.1
        for _ in range(MAX_LATE_IN_A_ROW):
            assert await prefill(agent) == (waited_s, None)
        await asyncio.sleep(0.01)
        for _ in range(20):
            assert await prefill(agent) == (0.1, None)
        agent.delay_s = 0.5  # it is well again, and the next one that is asked shows it
        assert await prefill(agent) == (0.1, None)
        await asyncio.sleep(2)
        for _ in range(3):
            assert await prefill(agent) == (in_time_s, FORECAST)

    run(scenario())


def test_a_forecast_just_in_time_is_waited_for_again_and_again() -> None:
    async def scenario() -> None:
        agent = StandInAgent(delay_s=1.9, timeout_s=2)
        for _ in range(5):
            assert await prefill(agent) == (1.9, FORECAST)

    run(scenario())


def test_legs_side_by_side_each_wait_no_longer_than_the_timeout() -> None:
    async def scenario() -> None:
        agent = StandInAgent(delay_s=30, timeout_s=2)
        assert await asyncio.gather(*(prefill(agent) for _ in range(8))) == [(2.0, None)] * 8
        await asyncio.sleep(0.01)
        assert await asyncio.gather(*(prefill(agent) for _ in range(8))) == [(0.1, None)] * 8

    run(scenario())


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_what_has_come_by_the_end_of_a_long_prefill_counts_however_late(mode: str, is_open: bool) -> None:
    async def scenario() -> None:
        agent = StandInAgent(mode=mode, delay_s=3, timeout_s=2)
        for _ in range(MAX_LATE_IN_A_ROW if is_open else 0):
            agent.breaker.observe(False)
        took_s, forecast = await prefill(agent, engine_s=5)
        assert forecast == FORECAST
        assert took_s == (7 if mode == "sequential" and not is_open else 5)

    run(scenario())


@pytest.mark.parametrize("is_open", [False, True])
def test_forecasts_under_way_never_pile_up_beyond_the_timeout(is_open: bool) -> None:
    async def scenario() -> None:
        agent = StandInAgent(delay_s=1e6, timeout_s=2)
        for _ in range(MAX_LATE_IN_A_ROW if is_open else 0):
            agent.breaker.observe(False)
        legs, most = [], 0
        for _ in range(100):  # ten legs a second
            legs.append(asyncio.ensure_future(prefill(agent)))
            await asyncio.sleep(0.1)
            most = max(most, agent.num_predicting)
        assert most <= 21
        await asyncio.gather(*legs)
        await asyncio.sleep(2.01)
        assert agent.num_predicting == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())


def test_the_forecast_of_a_cancelled_leg_ends_too() -> None:
    async def scenario() -> None:
        agent = StandInAgent(delay_s=1e6, timeout_s=2)
        exchange = Exchange(agent, queueing([]), "prefill")
        await asyncio.sleep(1)
        exchange.task.cancel()
        await asyncio.sleep(1.01)
        assert agent.num_predicting == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())


def test_a_forecast_that_fails_is_not_logged_as_an_error_that_nobody_saw() -> None:
    async def refusing(scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        await receive()
        await send({**START, "status": 400})
        await send({"type": "http.response.body", "body": b"{}"})

    async def scenario() -> None:
        unseen: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        agent = StandInAgent(delay_s=0.1)
        agent.forecast_error = RuntimeError("the predictor fell over")
        exchange = Exchange(agent, refusing, "prefill")
        await exchange.task
        assert exchange.sent[0]["status"] == 400
        await settled(after_s=2)
        assert agent.num_predicting == 0
        gc.collect()
        assert unseen == []

    run(scenario())
