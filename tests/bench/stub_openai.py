"""An OpenAI server that misbehaves on request. `python stub_openai.py PORT` runs a faultless one."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class StubServer:
    """Streams `max_tokens` tokens; its fields say how it misbehaves and hold what it was sent."""

    token_interval_s: float = 0.002
    tokens_per_event: int = 1
    with_running_usage: bool = True
    status: int = 200
    drop_after_tokens: int | None = None
    error_after_tokens: int | None = None
    hang_after_tokens: int | None = None
    short_by: int = 0
    model_name: str = "tiny-words"
    rows: list[dict[str, Any]] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    num_running: int = 0
    max_running: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        if self.rows is not None:
            app.router.add_get("/tetri/requests", self.requests)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model_name}]})

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def requests(self, http: web.Request) -> web.Response:
        assert self.rows is not None
        return web.json_response({"requests": self.rows[-int(http.query["limit"]) :]})

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.bodies.append(body)
        self.ids.append(http.headers["X-Request-Id"])
        if self.status != 200:
            return web.json_response({"error": {"message": "queue is full", "type": "x"}}, status=self.status)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            return await self._stream(http, body)
        finally:
            self.num_running -= 1

    async def _stream(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        num_tokens, sent = body["max_tokens"] - self.short_by, 0
        while sent < num_tokens:
            await asyncio.sleep(self.token_interval_s)
            if sent == self.drop_after_tokens:
                assert http.transport is not None
                http.transport.abort()
                return response
            if sent == self.error_after_tokens:
                await response.write(b'data: {"error": {"message": "decode instance lost"}}\n\n')
                return response
            if sent == self.hang_after_tokens:
                await asyncio.sleep(30)
            new = min(self.tokens_per_event, num_tokens - sent)
            sent += new
            event: dict[str, Any] = {"choices": [{"index": 0, "text": "w " * new}]}
            if self.with_running_usage:
                event["usage"] = {"completion_tokens": sent}
            data = f"data: {json.dumps(event)}\n\n".encode()
            await response.write(data[:7])  # split where a network may split it
            await response.write(data[7:])
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response


if __name__ == "__main__":
    web.run_app(StubServer().app(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
