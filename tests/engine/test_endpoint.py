"""The routes of an instance that change something: who may use them, and what they refuse. No vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.types import InstanceLoad, InstanceState, Role
from serving_plugin.engine import agent as agent_module
from serving_plugin.engine import entry_points, settings
from serving_plugin.engine.agent import Agent
from serving_plugin.engine.entry_points import TetriEndpoint, api_keys, key_check
from serving_plugin.wire import DISPATCH_PATH

CHUNK_PATH = "/tetri/chunk"
LIMIT = 2048
DECISION = {
    "request_id": "r1",
    "num_prompt_tokens": 7,
    "max_tokens": 50,
    "length_range": [0, 200],
    "is_heavy_decode": False,
}
DECODE = InstanceLoad(
    id="d0", incarnation="x", role=Role.DECODE, role_epoch=0, state=InstanceState.READY, sequence=1, num_waiting=0,
    num_loading=0, num_running=0, num_waiting_prompt_tokens=0, num_vetoed_tokens=0, num_total_blocks=100,
    num_free_blocks=100, num_pinned_blocks=0, block_size_tokens=16, num_heavy_decodes=0, num_light_decodes=0,
    busy_fraction=0.0,
)  # fmt: skip


@dataclass
class Core:
    """Stands in for EngineCore's client; `called` are the utility calls."""

    called: list[tuple[Any, ...]] = field(default_factory=list)

    async def call_utility_async(self, *call: Any) -> Any:
        self.called.append(call)
        return call[-1]


@dataclass
class Server:
    """An instance's API server, started with `api_key` and without vLLM."""

    app: FastAPI
    core: Core

    async def post(self, path: str, body: Any = None, raw: bytes | None = None, key: str | None = None) -> Any:
        """(status, body)."""
        messages: list[Any] = []
        headers = [(b"content-type", b"application/json")]
        if key is not None:
            headers.append((b"authorization", key.encode("latin-1")))
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}

        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(body).encode() if raw is None else raw}

        async def send(message: Any) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        return messages[0]["status"], json.loads(b"".join(message.get("body", b"") for message in messages))


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server as vLLM does: routes first, state later."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(settings, "settings_of", lambda config: InstanceSettings(Role.PREFILL, "p0", "http://x"))
    monkeypatch.setattr(entry_points, "kv_fingerprint", lambda config: "fp")
    monkeypatch.setattr("atexit.register", lambda call: None)

    async def start_nothing(agent: Agent) -> None:
        agent.dispatcher.update((DECODE,), {"d0": "http://d0"})

    monkeypatch.setattr(agent_module.Agent, "start", start_nothing)

    async def start(api_key: list[str] | None = None) -> Server:
        core, endpoint, app = Core(), TetriEndpoint(), FastAPI()
        config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=2048),
            kv_transfer_config=SimpleNamespace(engine_id="e0"),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=LIMIT),
        )
        client = SimpleNamespace(vllm_config=config, get_tokenizer=lambda: None, engine_core=core)
        endpoint.attach_router(app)
        args = SimpleNamespace(served_model_name=None, model="m", api_key=api_key)
        await endpoint.init_state(client, app.state, args)
        endpoint._agent._receiver._socket.close()
        return Server(app, core)

    return start


Start = Callable[..., Any]


async def test_another_decode_instance_is_named(start: Start) -> None:
    server = await start()
    found = {"decode_id": "d0", "decode_url": "http://d0"}
    assert await server.post(DISPATCH_PATH, {"tetri": DECISION, "exclude": ["d1"]}) == (200, found)
    assert await server.post(DISPATCH_PATH, {"tetri": {**DECISION, "times": {}}}) == (200, found)
    nobody = {"decode_id": None, "decode_url": None}
    assert await server.post(DISPATCH_PATH, {"tetri": DECISION, "exclude": ["d0"]}) == (200, nobody)


@pytest.mark.parametrize("chunk_tokens", [0, 1, LIMIT])
async def test_a_chunk_within_the_engines_limit_is_set(start: Start, chunk_tokens: int) -> None:
    server = await start()
    assert await server.post(CHUNK_PATH, {"chunk_tokens": chunk_tokens}) == (200, {"chunk_tokens": chunk_tokens})
    assert server.core.called == [("tetri_set_chunk_tokens", chunk_tokens)]


@pytest.mark.parametrize("path", [DISPATCH_PATH, CHUNK_PATH])
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe", b"[" * 200_000, b"null", b"3", b"[]", b'"x"', b"{}", b'{"tetri": null}', b'{"tetri": 1}',
     b'{"chunk_tokens": null}', b'{"chunk_tokens": {}}', b'{"chunk_tokens": NaN}', b'{"chunk_tokens": "8"}',
     b'{"chunk_tokens": -1}', b'{"chunk_tokens": 18446744073709551616}', b'{"chunk_tokens": 1%s}' % (b"0" * 4000),
     b'{"chunk_tokens": 1%s}' % (b"0" * 5000)],
)  # fmt: skip
async def test_a_body_that_makes_no_sense_is_400_in_one_line(start: Start, path: str, raw: bytes) -> None:
    server = await start()
    status, answer = await server.post(path, raw=raw)
    assert_refused(status, answer)
    assert server.core.called == []


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in DECISION for value in (None, {}, [None], 1.5, float("nan"), 2**64)),
        {"length_range": [5, 1]},
        {"length_range": [5, 5]},
        {"length_range": [-1, 5]},
        {"length_range": [0, 2**63]},
        {"length_range": [0, 5, 6]},
        {"num_prompt_tokens": -1},
        {"request_id": 3},
    ],
)
async def test_a_decision_that_no_dispatcher_makes_is_400(start: Start, changes: dict[str, Any]) -> None:
    status, answer = await (await start()).post(DISPATCH_PATH, {"tetri": {**DECISION, **changes}})
    assert_refused(status, answer)
    assert f"tetri.{next(iter(changes))}" in answer["error"]["message"]


@pytest.mark.parametrize("exclude", [None, "d0", {"d0": 1}, [["d0"]], [None]])
async def test_odd_exclusions_are_400(start: Start, exclude: Any) -> None:
    assert_refused(*await (await start()).post(DISPATCH_PATH, {"tetri": DECISION, "exclude": exclude}))


def assert_refused(status: int, answer: Any) -> None:
    assert status == 400
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["type"], answer["error"]["code"]) == ("BadRequestError", 400)
    message = answer["error"]["message"]
    assert message and "\n" not in message and len(message) < 300


async def test_a_chunk_over_the_engines_limit_is_refused_with_the_limit(start: Start) -> None:
    server = await start()
    status, answer = await server.post(CHUNK_PATH, {"chunk_tokens": LIMIT + 1})
    assert_refused(status, answer)
    assert answer["error"]["param"] == "chunk_tokens"
    assert answer["error"]["message"].startswith("chunk_tokens=2049: over 2048 (--max-num-batched-tokens)")
    assert server.core.called == []


# Keys

REQUESTS = [(DISPATCH_PATH, {"tetri": DECISION}), (CHUNK_PATH, {"chunk_tokens": 8})]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_server_with_keys_asks_for_one_of_them(start: Start, path: str, body: Any) -> None:
    server = await start(["one", "two"])
    for key in (None, "", "one", "Bearer", "Bearer ", "Bearer three", "Bearer one two", "Basic one", "Bearer  one"):
        status, answer = await server.post(path, body, key=key)
        assert (status, answer["error"]["code"]) == (401, 401), key
        assert (await server.post(path, raw=b"{", key=key))[0] == 401, "nothing is said of a stranger's body"
    assert server.core.called == []
    for key in ("Bearer one", "Bearer two", "bearer one"):
        assert (await server.post(path, body, key=key))[0] == 200


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_server_without_keys_is_open(start: Start, path: str, body: Any) -> None:
    for key in (None, "Bearer any"):
        assert (await (await start()).post(path, body, key=key))[0] == 200


@pytest.mark.parametrize(
    ("option", "environment", "keys"),
    [
        (None, None, []),
        (None, "", []),
        (None, "env", ["env"]),
        (["a", "b"], "env", ["a", "b"]),
        ([], "env", ["env"]),
        (["", "a"], None, ["a"]),
    ],
)
def test_keys_come_from_where_vllm_takes_them(
    option: list[str] | None, environment: str | None, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if environment is not None:
        monkeypatch.setenv("VLLM_API_KEY", environment)
    assert api_keys(SimpleNamespace(api_key=option)) == keys


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr(entry_points.hmac, "compare_digest", compare)
    is_allowed = key_check(["a", "b", "ü"])
    assert [is_allowed(f"Bearer {key}") for key in ("a", "ü", "c")] == [True, True, False]
    assert len(compared) == 9
