"""What vLLM loads by name: the general plugin (every process) and the endpoint plugin (API server).

Both are entry points called `tetri`; `VLLM_PLUGINS=tetri` turns them on.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from serving_plugin.core.errors import BadRequestError, TetriError

logger = logging.getLogger(__name__)


def register() -> None:
    """General plugin: gives EngineCore the utility calls `tetri_*`. Idempotent; vLLM calls it in every process."""
    from vllm.v1.engine.core import EngineCore

    def tetri_inspect(self: Any, what: str) -> dict[str, Any]:
        result: dict[str, Any] = self.scheduler.tetri_inspect(what)
        return result

    def tetri_withdraw(self: Any, own_id: str, room_tokens: int | None) -> str:
        return str(self.scheduler.withdraw(own_id, room_tokens))

    def tetri_set_chunk_tokens(self: Any, chunk_tokens: int) -> int:
        self.scheduler.set_chunk_tokens(chunk_tokens)
        return chunk_tokens

    EngineCore.tetri_inspect = tetri_inspect
    EngineCore.tetri_withdraw = tetri_withdraw
    EngineCore.tetri_set_chunk_tokens = tetri_set_chunk_tokens


class TetriEndpoint:
    """Endpoint plugin: the agent, its routes and the legs' middleware in the API server."""

    name = "tetri"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._agent: Any = None
        self._tokenizer: Any = None
        self._max_model_len = 0
        self._is_allowed: Callable[[str | None], bool] = lambda authorization: False

    def attach_router(self, app: Any) -> None:
        """Add `/tetri/...` and the middleware; called before the state is initialised."""
        from serving_plugin.engine.legs import LegMiddleware
        from serving_plugin.wire import DISPATCH_PATH

        app.add_middleware(
            LegMiddleware,
            agent_of=lambda: self._agent,
            decode_tokens=lambda ids: self._tokenizer.decode(ids),
            max_model_len=lambda: self._max_model_len,
        )

        app.add_route(DISPATCH_PATH, self._route(self._redispatch), methods=["POST"])
        app.add_route("/tetri/chunk", self._route(self._set_chunk_tokens), methods=["POST"])

        @app.get("/tetri/instance")
        async def instance() -> dict[str, Any]:
            return self._agent.status()

        @app.get("/tetri/ledger")
        async def ledger() -> dict[str, Any]:
            return await self._inspect("ledger")

        @app.get("/tetri/scheduler")
        async def scheduler() -> dict[str, Any]:
            return await self._inspect("requests")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Start the agent. Bad settings end the server's start with one clear line."""
        import atexit

        from serving_plugin.engine.agent import Agent
        from serving_plugin.engine.settings import settings_of

        self._is_allowed = key_check(api_keys(args))
        config = engine_client.vllm_config
        settings = settings_of(config)
        names = args.served_model_name or [args.model]
        self._tokenizer = engine_client.get_tokenizer()
        self._max_model_len = config.model_config.max_model_len
        self._engine_client = engine_client
        self._agent = Agent(settings, config.kv_transfer_config.engine_id, (*names, args.model), kv_fingerprint(config))
        self._agent.withdraw = self._withdraw
        await self._agent.start()
        atexit.register(self._agent.close)

    async def _withdraw(self, own_id: str, room_tokens: int | None) -> Any:
        from serving_plugin.engine.queue_watch import Withdrawal

        core = self._engine_client.engine_core
        return Withdrawal(await core.call_utility_async("tetri_withdraw", own_id, room_tokens))

    def _route(self, answer: Callable[[object], Awaitable[dict[str, Any]]]) -> Callable[[Any], Awaitable[Any]]:
        """A POST with a JSON body, for whoever may use the API; errors in OpenAI's shape."""
        from starlette.responses import JSONResponse

        from serving_plugin.engine.legs import error_body

        async def endpoint(request: Any) -> JSONResponse:
            if not self._is_allowed(request.headers.get("Authorization")):
                return JSONResponse(error_body(401, "Unauthorized: the server has an API key (--api-key)"), 401)
            try:
                return JSONResponse(await answer(_json(await request.body())))
            except TetriError as error:
                return JSONResponse(error_body(error.http_status, str(error), error.param), error.http_status)

        return endpoint

    async def _redispatch(self, body: object) -> dict[str, Any]:
        return self._agent.redispatch(body)

    async def _set_chunk_tokens(self, body: object) -> dict[str, Any]:
        """`POST /tetri/chunk {"chunk_tokens": N}`: from the next step on."""
        if not isinstance(body, dict):
            raise BadRequestError(f"the body is a JSON {type(body).__name__}, needs an object")
        chunk_tokens = body.get("chunk_tokens")
        given = f"chunk_tokens={chunk_tokens!r:.60}"
        if type(chunk_tokens) is not int or chunk_tokens < 0:
            message = f"{given}: must be a whole number, 0 (vLLM's own limit) or more"
            raise BadRequestError(message, param="chunk_tokens")
        limit = self._engine_client.vllm_config.scheduler_config.max_num_batched_tokens
        if chunk_tokens > limit:
            message = f"{given}: over {limit} (--max-num-batched-tokens), the most that a step of this engine takes"
            raise BadRequestError(message, param="chunk_tokens")
        core = self._engine_client.engine_core
        return {"chunk_tokens": await core.call_utility_async("tetri_set_chunk_tokens", chunk_tokens)}

    async def _inspect(self, what: str) -> dict[str, Any]:
        result: dict[str, Any] = await self._engine_client.engine_core.call_utility_async("tetri_inspect", what)
        return result


def _json(raw: bytes) -> object:
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    return value


def api_keys(args: Any) -> list[str]:
    """The keys that vLLM's own routes ask for, from where vLLM 0.32 takes them; empty: they are open."""
    return [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]


def key_check(keys: Sequence[str]) -> Callable[[str | None], bool]:
    """Whether an `Authorization` header carries one of `keys` as its bearer token, in a time that tells nothing."""
    known = [_digest(key) for key in keys]

    def is_allowed(authorization: str | None) -> bool:
        scheme, _, token = (authorization or "").partition(" ")
        equal = [hmac.compare_digest(_digest(token), digest) for digest in known]
        return not known or (any(equal) and scheme.lower() == "bearer")

    return is_allowed


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def kv_fingerprint(config: Any) -> str:
    """What must be equal on both sides of a KV transfer, as one readable string."""
    from vllm.version import __version__

    model, cache = config.model_config, config.cache_config
    return "|".join(str(part) for part in (__version__, model.model, model.dtype, cache.cache_dtype, cache.block_size))
