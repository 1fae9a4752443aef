"""The legs' middleware around a stand-in for vLLM's application: dispatch is added, everything else is untouched."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from serving_plugin.core.config import InstanceSettings, PredictionSettings
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.core.types import Role
from serving_plugin.engine.legs import LegMiddleware, conversation_of
from serving_plugin.predictor.conversation import Message

FORECAST = LengthForecast((0, 200, 400), (0.2, 0.8))
META = {"request_id": "r1", "max_tokens": 50, "arrival_s": 1.0}
BODY = {"model": "m", "prompt": "hello", "kv_transfer_params": {"do_remote_decode": True, "tetri": META}}


class StandInAgent:
    """Answers like `Agent`; `delay_s` is how long its predictor takes."""

    def __init__(
        self, role: Role = Role.PREFILL, mode: str = "parallel", delay_s: float = 0.0, timeout_s: float = 0.2
    ) -> None:
        prediction = PredictionSettings(mode=mode, timeout_s=timeout_s)
        self.settings = InstanceSettings(role, "p0", "http://127.0.0.1:1", prediction=prediction)
        self.role = role
        self.num_legs = {"prefill": 0, "decode": 0, "whole": 0}
        self.events: list[str] = []
        self.dispatched: list[tuple[LengthForecast | None, int]] = []
        self._delay_s = delay_s

    async def predict(self, request_id: str, messages: Sequence[Message]) -> LengthForecast:
        await asyncio.sleep(self._delay_s)
        self.events.append(f"forecast of {messages[-1].content}")
        return FORECAST

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
    [b"", b"[]", b"{", b'{"kv_transfer_params": {"tetri": 3}}', b'{"kv_transfer_params": [1]}', b'{"prompt": "a"}'],
)
async def test_a_prefill_leg_without_metadata_is_refused(raw: bytes) -> None:
    status, answer = await call(StandInAgent(), None, "prefill", raw=raw)
    assert status == 400
    assert "request_id" in answer["error"]["message"]


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
