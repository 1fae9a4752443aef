"""Gateway: the OpenAI front door and global scheduler. One light process: no torch, vllm, transformers or mlflow.

`python -m serving_plugin.control.gateway` runs one; `tetri gateway` and `tetri serve` do too. State is soft: kill a
gateway, start another, and agents dial in again within a report interval.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import sys
import time
from typing import Any

import aiohttp
from aiohttp import web

from serving_plugin.control.agents import AgentDoor
from serving_plugin.control.forecasts import ForecastMonitor
from serving_plugin.control.handler import RequestHandler
from serving_plugin.control.http_errors import translate_errors
from serving_plugin.control.legs import LegClient
from serving_plugin.control.metrics import GatewayMetrics
from serving_plugin.control.monitor import Instance, Monitor
from serving_plugin.control.request_table import RequestTable
from serving_plugin.control.settings import GatewaySettings
from serving_plugin.core.errors import BadRequestError, ConfigurationError, TetriError
from serving_plugin.core.registry import resolve_policy
from serving_plugin.core.types import Role
from serving_plugin.wire import AGENT_PATH

logger = logging.getLogger(__name__)

_MODELS_TIMEOUT_S = 5.0
_DEFAULT_RECORDS = 1000


class Gateway:
    """One gateway's parts and its read-only endpoints. Make and close it inside a running event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        place, bypass = resolve_policy("place", settings.place), resolve_policy("bypass", settings.bypass)
        self.settings = settings
        self.monitor = Monitor()
        self.table = RequestTable(settings.history_size)
        self.forecasts = ForecastMonitor(settings.drift())
        self.metrics = GatewayMetrics(self.monitor, self.forecasts)
        self.client = LegClient(settings.connect_timeout_s, settings.request_timeout_s, self.metrics.count_retry)
        self.agents = AgentDoor(
            self.monitor,
            self.table,
            self.metrics,
            self.forecasts,
            settings.gateway_id,
            settings.broadcast_interval_s,
        )
        self._started_s = time.time()
        self._cards: dict[str, dict[str, Any]] = {}
        self._handler = RequestHandler(
            settings, self.monitor, self.table, self.metrics, self.forecasts, self.client, place, bypass
        )

    def app(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(middlewares=[translate_errors], client_max_size=self.settings.max_body_bytes)
        app.add_routes(
            [
                web.post("/v1/completions", self._handler.completions),
                web.post("/v1/chat/completions", self._handler.chat_completions),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/tetri/status", self._status),
                web.get("/tetri/requests", self._requests),
                web.get(AGENT_PATH, self.agents.handle),
            ]
        )
        app.on_shutdown.append(self._shutdown)
        app.on_cleanup.append(self._cleanup)
        return app

    async def _shutdown(self, app: web.Application) -> None:
        await self.agents.close()

    async def _cleanup(self, app: web.Application) -> None:
        await self.client.close()

    async def _models(self, http: web.Request) -> web.Response:
        """vLLM's own model cards, fetched once per served model."""
        headers = {name: http.headers[name] for name in ("Authorization",) if name in http.headers}
        by_model = {i.hello.model: i for i in self.monitor.instances()}
        for model, instance in by_model.items():
            if model not in self._cards:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
                    url = f"{instance.hello.url.rstrip('/')}/v1/models"
                    cards = (await self.client.get_json(url, headers, _MODELS_TIMEOUT_S))["data"]
                    self._cards.update({card["id"]: card for card in cards if card["id"] == model})
        plain = {"object": "model", "created": int(self._started_s), "owned_by": "vllm"}
        data = [self._cards.get(model, {"id": model, **plain}) for model in sorted(by_model)]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, http: web.Request) -> web.Response:
        """200 when a request can be served: at least one READY instance of either role."""
        missing = [role.value for role in Role if not self.monitor.ready(role)]
        if missing:
            return web.json_response({"status": "not ready", "missing": missing}, status=503)
        return web.json_response({"status": "ready"})

    async def _metrics(self, http: web.Request) -> web.Response:
        self.metrics.open_requests.set(len(self.table))
        return web.Response(
            body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _status(self, http: web.Request) -> web.Response:
        now_s = time.monotonic()
        return web.json_response(
            {
                "gateway_id": self.settings.gateway_id,
                "uptime_s": round(time.time() - self._started_s, 3),
                "models": self.monitor.models(),
                "open_requests": len(self.table),
                "phases": self.table.phases(),
                "instances": [_describe(instance, now_s) for instance in self.monitor.instances()],
                "lost": [dataclasses.asdict(hello) for hello in self.monitor.lost()],
                "is_forecast_trusted": self.forecasts.is_trusted,
                "forecasts": [dataclasses.asdict(figures) for figures in self.forecasts.figures()],
            }
        )

    async def _requests(self, http: web.Request) -> web.Response:
        text = http.query.get("limit", str(_DEFAULT_RECORDS))
        if not (text.isascii() and text.isdecimal()):
            raise BadRequestError(f"limit={text!r}: needs a whole number of 0 or more", param="limit")
        records = self.table.records(int(text[:18]))
        return web.json_response({"requests": [dataclasses.asdict(record) for record in records]})


def _describe(instance: Instance, now_s: float) -> dict[str, Any]:
    hello, load = instance.hello, instance.load
    return {
        "id": hello.instance_id,
        "url": hello.url,
        "model": hello.model,
        "incarnation": hello.incarnation,
        "role": load.role if load else hello.role,
        "role_epoch": load.role_epoch if load else hello.role_epoch,
        "state": load.state if load else "starting",
        "predictor": hello.predictor,
        "kv_fingerprint": hello.kv_fingerprint,
        "report_age_s": None if instance.received_s is None else round(now_s - instance.received_s, 3),
        "sent_tokens": instance.sent_tokens,
        "load": dataclasses.asdict(load) if load else None,
    }


async def start_app(gateway: Gateway, port: int) -> web.AppRunner:
    """Listen on `port` (0: any free one); the caller cleans the runner up.

    Raises:
        ConfigurationError: the port is taken.
    """
    # A client that hangs up cancels its handler, which closes the leg, which makes vLLM abort the request.
    host, timeout_s = gateway.settings.host, gateway.settings.shutdown_timeout_s
    runner = web.AppRunner(gateway.app(), handler_cancellation=True, access_log=None, shutdown_timeout=timeout_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigurationError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another port with --port"
        ) from None
    return runner


async def serve(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    runner = await start_app(Gateway(settings), settings.port)
    logger.info("gateway on http://%s:%d", settings.host, settings.port)
    try:
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: list[str] | None = None) -> int:
    """Run one gateway process: `--settings` is `GatewaySettings` as JSON."""
    parser = argparse.ArgumentParser(prog="python -m serving_plugin.control.gateway", description=main.__doc__)
    parser.add_argument("--settings", default="{}", help="GatewaySettings as a JSON object")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(_settings(arguments.settings)))
    except TetriError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _settings(text: str) -> GatewaySettings:
    try:
        return GatewaySettings(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"--settings {text!r}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
