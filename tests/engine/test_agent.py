"""The agent without vLLM: whom it trusts, the shadow that is asked beside the champion, and what it relinquishes.

Gateways, control connections and predictor processes are real; what answers inside those processes is a script.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving_plugin.control.gateway import Gateway, start_app
from serving_plugin.control.settings import GatewaySettings
from serving_plugin.core.config import InstanceSettings, PredictionSettings
from serving_plugin.core.drift import ForecastSummary, summarise
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.core.types import InstanceLoad, InstanceState, Role
from serving_plugin.engine import agent as agent_module
from serving_plugin.engine import predictor_process
from serving_plugin.engine.agent import RELINQUISH_INTERVAL_S, Agent
from serving_plugin.engine.load_feed import EngineSnapshot, LoadPublisher
from serving_plugin.engine.predictor_process import PredictorProcess, ShadowPredictor
from serving_plugin.engine.queue_watch import Withdrawal
from serving_plugin.predictor.conversation import Message

pytestmark = pytest.mark.timeout(120)

FORECAST = LengthForecast((0, 200, 400), (0.2, 0.8))
META = {"request_id": "r1", "num_prompt_tokens": 7}
HELLO = (Message("user", "hello"),)

# Speaks the predictor service's protocol. champion: [0, 100) at once; challenger: [100, 200); slow: after a second.
SERVICE = """
import json, sys, time, zmq
endpoint, model = sys.argv[1:]
if model == "broken":
    sys.exit("error: no such model")
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(endpoint)
while True:
    *_, peer, body = None, *socket.recv_multipart()
    message = json.loads(body)
    if message.get("info"):
        reply = {"info": {"name": "length-predictor", "version": {"champion": "3"}.get(model, "4")}}
    elif model == "failing":
        reply = {"id": message["id"], "error": "no"}
    else:
        if model == "slow":
            time.sleep(1)
        edges = [0, 100] if model == "champion" else [100, 200]
        reply = {"id": message["id"], "edges_tokens": edges, "probabilities": [1.0]}
    socket.send_multipart([peer, json.dumps(reply).encode()])
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictor processes run `SERVICE` under the name of their model."""
    script = tmp_path / "service.py"
    script.write_text(SERVICE)

    def command(self: PredictorProcess) -> tuple[str, ...]:
        return (sys.executable, str(script), self._endpoint, str(self._settings.model))

    monkeypatch.setattr(PredictorProcess, "_command", command)


async def until(holds: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "did not come true"
        await asyncio.sleep(0.01)


@pytest.fixture
async def make_agent() -> AsyncIterator[Callable[..., Any]]:
    """Starts agents, of prefill instances unless told otherwise, each with an engine that says it is idle."""
    opened: list[Any] = []

    async def make(gateways: tuple[str, ...] = (), role: Role = Role.PREFILL, **prediction: Any) -> Agent:
        engine_id = uuid.uuid4().hex
        publisher = LoadPublisher(engine_id, interval_s=0.02)
        publisher.publish(EngineSnapshot(num_total_blocks=10, num_free_blocks=10))
        settings = InstanceSettings(
            role, f"{role[0]}0", "http://127.0.0.1:1", gateways, prediction=PredictionSettings(**prediction)
        )
        agent = Agent(settings, engine_id, ("m",), "fp")
        opened.extend((publisher, agent))
        await agent.start()
        return agent

    yield make
    for part in reversed(opened):
        await asyncio.to_thread(part.close)
        for process in (getattr(part, "predictor", None), getattr(getattr(part, "shadow", None), "_process", None)):
            if process is not None and process._client is not None:
                await process._client.close()


# Trust


def drift(gateway: Gateway, upper_tokens: int) -> None:
    """Ten finished requests of 50 tokens whose upper bound was `upper_tokens`."""
    summary = summarise(LengthForecast((0, upper_tokens + 1), (1.0,)), "v3", 0.99, 1000)
    for _ in range(10):
        gateway.forecasts.observe((summary,), 50)


async def test_one_distrusting_gateway_is_enough_while_it_is_connected(
    make_agent: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    gateways = [Gateway(GatewaySettings(broadcast_interval_s=0.02, drift_window=10, drift_band=0.2)) for _ in range(2)]
    runners = [await start_app(gateway, port=0) for gateway in gateways]
    urls = tuple(f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners)
    try:
        agent = await make_agent(urls)

        def source() -> str:
            return str(agent.dispatch(META, FORECAST, 1000)["forecast_source"])

        await until(lambda: all(gateway.monitor.instances() for gateway in gateways))
        assert source() == "model"
        drift(gateways[0], upper_tokens=10)
        await until(lambda: source() == "history:drift")
        assert agent.status()["distrusting_gateways"] == [urls[0]]
        await asyncio.sleep(0.2)  # the other gateway's broadcasts go on and do not overrule it
        assert source() == "history:drift"
        drift(gateways[0], upper_tokens=60)  # good ones: it returns by itself
        await until(lambda: source() == "model")
        drift(gateways[1], upper_tokens=10)
        await until(lambda: source() == "history:drift")
        await runners[1].cleanup()  # a gateway that is gone has no say
        await until(lambda: source() == "model")
        assert caplog.text.count("length ranges come from history: drift at http") == 2
        assert caplog.text.count("length ranges come from the model") == 2
    finally:
        for runner in runners:
            await runner.cleanup()


# Champion and shadow


def summaries(agent: Agent, request_id: str, forecast: LengthForecast | None) -> list[ForecastSummary]:
    answer = agent.dispatch({**META, "request_id": request_id}, forecast, 1000)
    return [ForecastSummary.from_dict(raw) for raw in json.loads(json.dumps(answer))["summaries"]]


def shadow_of(agent: Agent) -> ShadowPredictor:
    assert agent.shadow is not None
    return agent.shadow


async def test_a_shadow_is_asked_too_and_changes_no_decision(scripted: None, make_agent: Callable[..., Any]) -> None:
    agent = await make_agent(model="champion", shadow_model="challenger")
    shadow = shadow_of(agent)
    await until(lambda: shadow.status()["is_ready"])
    forecast = await agent.predict("r1", HELLO)
    await until(lambda: not shadow._running)
    alone = await make_agent()
    expected, decided = (a.dispatch(META, forecast, 1000) for a in (alone, agent))
    for decision in (expected, decided):
        decision.pop("times"), decision.pop("incarnation")
    champion, challenger = (ForecastSummary.from_dict(raw) for raw in decided.pop("summaries"))
    assert expected.pop("summaries") == []  # no process of its own, the same forecast given
    assert decided == expected
    assert (champion.model, champion.is_shadow, champion.high_tokens) == ("length-predictor v3", False, 95)
    assert (challenger.model, challenger.is_shadow, challenger.low_tokens) == ("length-predictor v4", True, 104)
    assert shadow.status()["num_forecasts"] == 1
    assert summaries(agent, "r1", forecast) == [champion]  # taken: told once


async def test_nothing_waits_for_a_slow_shadow(
    scripted: None, make_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor_process, "MAX_SHADOW_RUNNING", 2)
    agent = await make_agent(model="champion", shadow_model="slow")
    shadow = shadow_of(agent)
    await until(lambda: shadow.status()["is_ready"])
    for i in range(3):
        forecast = await agent.predict(f"r{i}", HELLO)
        assert [summary.is_shadow for summary in summaries(agent, f"r{i}", forecast)] == [False]
    assert not any(task.done() for task in shadow._running)
    assert (shadow.num_late, shadow.num_not_asked, shadow.num_forecasts) == (2, 1, 0)


async def test_forecasts_that_nobody_takes_are_bounded(
    scripted: None, make_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor_process, "MAX_SHADOW_UNTAKEN", 3)
    agent = await make_agent(shadow_model="challenger")
    shadow = shadow_of(agent)
    await until(lambda: shadow.status()["is_ready"])
    for i in range(5):
        assert await agent.predict(f"r{i}", HELLO) is None  # no champion: history decides, the shadow is measured
    await until(lambda: not shadow._running)
    assert [len(summaries(agent, f"r{i}", None)) for i in range(5)] == [0, 0, 1, 1, 1]


async def test_a_failing_shadow_is_left_out_and_counted(scripted: None, make_agent: Callable[..., Any]) -> None:
    agent = await make_agent(model="champion", shadow_model="failing")
    shadow = shadow_of(agent)
    await until(lambda: shadow.status()["is_ready"])
    forecast = await agent.predict("r1", HELLO)
    await until(lambda: not shadow._running)
    assert [summary.model for summary in summaries(agent, "r1", forecast)] == ["length-predictor v3"]
    assert shadow.num_failed == 1


async def test_a_shadow_that_cannot_start_is_a_warning(
    scripted: None, make_agent: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    agent = await make_agent(model="champion", shadow_model="broken")
    await until(lambda: "no shadow predictor runs" in caplog.text)
    (record,) = [r for r in caplog.records if "no shadow predictor runs" in r.message]
    assert record.levelno == logging.WARNING and "shadow predictor broken: error: no such model" in record.message
    forecast = await agent.predict("r1", HELLO)
    assert len(summaries(agent, "r1", forecast)) == 1
    assert shadow_of(agent).status()["is_ready"] is False and shadow_of(agent).num_not_asked == 1


# Decode instances: who fits where, and who goes elsewhere

DECODE = InstanceLoad(
    id="d0", incarnation="x", role=Role.DECODE, role_epoch=0, state=InstanceState.READY, sequence=1, num_waiting=0,
    num_loading=0, num_running=0, num_waiting_prompt_tokens=0, num_vetoed_tokens=0, num_total_blocks=100,
    num_free_blocks=100, num_pinned_blocks=0, block_size_tokens=16, num_heavy_decodes=0, num_light_decodes=0,
    busy_fraction=0.0,
)  # fmt: skip
URLS = {"d0": "http://d0", "d1": "http://d1"}


async def test_a_relinquished_request_gets_another_instance_and_nobody_if_none_is_left(
    make_agent: Callable[..., Any],
) -> None:
    agent = await make_agent()
    agent.dispatcher.update((DECODE, replace(DECODE, id="d1")), URLS)
    decision = json.loads(json.dumps(agent.dispatch(META, FORECAST, 1000)))
    decision.pop("summaries")  # as gateways do
    first = decision["decode_id"]
    (other,) = URLS.keys() - {first}

    def again(*exclude: str) -> dict[str, Any]:
        return json.loads(json.dumps(agent.redispatch({"tetri": decision, "exclude": list(exclude)})))  # type: ignore[no-any-return]

    assert again(first) == {"decode_id": other, "decode_url": URLS[other]}
    assert again(other)["decode_id"] == first
    assert again(first, other) == {"decode_id": None, "decode_url": None}
    agent.dispatcher.update((DECODE, replace(DECODE, id="d1", state=InstanceState.DRAINING)), URLS)
    assert again("d0") == {"decode_id": None, "decode_url": None}
    agent.dispatcher.update((DECODE, replace(DECODE, id="d1", num_total_blocks=62)), URLS)
    assert again("d0") == {"decode_id": None, "decode_url": None}  # 7 + 1000 tokens are 63 blocks


async def test_binding_elsewhere_is_a_promise_like_any_dispatch(make_agent: Callable[..., Any]) -> None:
    agent = await make_agent()
    agent.dispatcher.update((DECODE, replace(DECODE, id="d1")), URLS)
    decision = agent.dispatch(META, FORECAST, 1000)
    promised = agent.dispatcher._promised
    before = {id: promised[id].promise.num_blocks if id in promised else 0 for id in URLS}
    (other,) = URLS.keys() - {decision["decode_id"]}
    agent.redispatch({"tetri": decision, "exclude": [decision["decode_id"]]})
    assert agent.dispatcher._promised[other].promise.num_blocks > before[other]


@pytest.mark.parametrize(
    ("loads", "can_ever_fit", "words"),
    [
        ((), True, "no READY decode instance is known"),
        ((replace(DECODE, state=InstanceState.DRAINING),), True, "no READY decode instance is known"),
        (
            (replace(DECODE, num_total_blocks=62), replace(DECODE, id="d1", num_total_blocks=10)),
            False,
            "7 prompt tokens and up to 1000 output tokens fit no decode instance's KV cache",
        ),
    ],
)
async def test_a_request_that_can_never_fit_is_told_apart_from_one_that_nobody_can_take_now(
    loads: tuple[InstanceLoad, ...], can_ever_fit: bool, words: str, make_agent: Callable[..., Any]
) -> None:
    agent = await make_agent()
    agent.dispatcher.update(loads, URLS)
    decision = agent.dispatch(META, FORECAST, 1000)
    assert (decision["decode_id"], decision["decode_url"]) == (None, None)
    assert decision["can_ever_fit"] is can_ever_fit
    assert words in decision["error"] and "\n" not in decision["error"]


async def test_a_request_that_fits_says_so(make_agent: Callable[..., Any]) -> None:
    agent = await make_agent()
    agent.dispatcher.update((replace(DECODE, num_total_blocks=63),), URLS)
    decision = agent.dispatch(META, FORECAST, 1000)
    assert (decision["decode_id"], decision["can_ever_fit"], decision["error"]) == ("d0", True, None)


NOT_DONE = [result for result in Withdrawal if result is not Withdrawal.DONE]


class Clock:
    """Stands in for the agent's `time` module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))


class Engine:
    """Stands in for EngineCore: notes what it is asked to withdraw, and answers `result`."""

    def __init__(self, agent: Agent) -> None:
        self.asked: list[tuple[str, int | None]] = []
        self.result = Withdrawal.DONE
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        agent.withdraw = self.withdraw

    async def withdraw(self, request_id: str, room_tokens: int | None) -> Withdrawal:
        self.asked.append((request_id, room_tokens))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.result


async def test_the_watch_of_a_leg_sees_the_room_of_others_and_asks_the_engine(make_agent: Callable[..., Any]) -> None:
    agent = await make_agent(role=Role.DECODE)
    engine = Engine(agent)
    watch = agent.watch("r1", True)
    assert (watch.admit, watch.may_relinquish) == (agent.settings.admit, True)
    assert agent.watch("r1", False).may_relinquish is False
    agent.dispatcher.update((DECODE,), URLS)
    assert watch.room_elsewhere_tokens() is None  # its own room is not elsewhere
    agent.dispatcher.update((DECODE, replace(DECODE, id="d1", num_free_blocks=3)), URLS)
    assert watch.room_elsewhere_tokens() == 48
    assert await watch.withdraw(48) is Withdrawal.DONE
    assert engine.asked == [("r1", 48)]


async def test_one_request_is_relinquished_per_interval(
    make_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' rooms are as old as the last broadcast: a whole queue must not go to the same room."""
    agent = await make_agent(role=Role.DECODE)
    engine, clock = Engine(agent), Clock(monkeypatch)
    withdraw = {name: agent.watch(name, True).withdraw for name in ("a", "b", "c")}
    assert await withdraw["a"](100) is Withdrawal.DONE
    assert await withdraw["b"](100) is Withdrawal.WAITS_ON  # it waits on
    clock.now_s += RELINQUISH_INTERVAL_S - 0.01
    assert await withdraw["b"](100) is Withdrawal.WAITS_ON
    clock.now_s += 0.02
    assert await withdraw["b"](100) is Withdrawal.DONE
    assert await withdraw["c"](100) is Withdrawal.WAITS_ON
    assert engine.asked == [("a", 100), ("b", 100)]


async def test_the_end_of_a_wait_needs_no_turn(make_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await make_agent(role=Role.DECODE)
    engine, _ = Engine(agent), Clock(monkeypatch)
    for name in ("a", "b"):
        assert await agent.watch(name, True).withdraw(None) is Withdrawal.DONE
    assert await agent.watch("c", True).withdraw(100) is Withdrawal.DONE  # nor does it take one
    assert engine.asked == [("a", None), ("b", None), ("c", 100)]


@pytest.mark.parametrize("result", [*NOT_DONE, RuntimeError("engine is gone")])
async def test_a_request_that_is_not_relinquished_takes_no_turn_from_others(
    result: Withdrawal | Exception, make_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that is too large for any room, looking again every half second, keeps the rest here for ever."""
    agent = await make_agent(role=Role.DECODE)
    engine, _ = Engine(agent), Clock(monkeypatch)
    if isinstance(result, Exception):
        engine.error = result
        with pytest.raises(RuntimeError, match="engine is gone"):
            await agent.watch("large", True).withdraw(100)
        engine.error = None
    else:
        engine.result = result
        assert await agent.watch("large", True).withdraw(100) is result
        engine.result = Withdrawal.DONE
    assert await agent.watch("small", True).withdraw(100) is Withdrawal.DONE
    assert [name for name, _ in engine.asked] == ["large", "small"]


async def test_nobody_else_is_withdrawn_while_the_engine_is_asked(
    make_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await make_agent(role=Role.DECODE)
    engine, _ = Engine(agent), Clock(monkeypatch)
    engine.gate.clear()
    first = asyncio.ensure_future(agent.watch("a", True).withdraw(100))
    await until(lambda: engine.asked)
    assert await agent.watch("b", True).withdraw(100) is Withdrawal.WAITS_ON
    engine.gate.set()
    assert await first is Withdrawal.DONE
    assert engine.asked == [("a", 100)]


async def test_without_an_engine_nothing_is_withdrawn(make_agent: Callable[..., Any]) -> None:
    agent = await make_agent(role=Role.DECODE)
    assert await agent.watch("a", True).withdraw(100) is Withdrawal.NOT_WAITING
