"""Length predictors beside a prefill instance, the champion and a shadow: a process each, one owner, asyncio clients.

No vLLM import.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving_plugin.core.config import PredictionSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.predictor.client import PredictorClient
from serving_plugin.predictor.conversation import Message
from serving_plugin.processes import Child, ChildSpec

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
FORECAST_TIMEOUT_S = (
    120.0  # after this nobody can still be waiting: the wait itself is bounded by `prediction.timeout_s`
)
MAX_SHADOW_RUNNING = 64  # forecasts that a shadow may owe: a slow one must not queue up work for ever
MAX_SHADOW_UNTAKEN = 1024  # forecasts of requests whose decision has not come, or never comes


class PredictorProcess:
    """Starts `serving_plugin.predictor.service` and asks it for forecasts. `kind` names it in log lines."""

    def __init__(self, settings: PredictionSettings, target_model: str, kind: str = "length predictor") -> None:
        self._settings = settings
        self._kind = kind
        self._folder = Path(tempfile.mkdtemp(prefix="tetri-predictor-"))
        self._endpoint = f"ipc://{self._folder / 'predictor.sock'}"
        self._target_model = target_model
        self._child: Child | None = None
        self._client: PredictorClient | None = None
        self._is_reported_dead = False
        self.info: dict[str, Any] = {}

    async def start(self) -> dict[str, Any]:
        """Start and wait until it answers; returns its info (version, provider, target).

        Raises:
            ConfigurationError: it ended (its last line says why) or did not answer in time.
        """
        settings = self._settings
        cores = (settings.core,) if settings.core is not None else tuple(sorted(os.sched_getaffinity(0)))
        self._child = Child(
            ChildSpec(self._kind, self._command(), self._folder / "predictor.log", {"OMP_NUM_THREADS": "1"}, cores)
        )
        self._client = PredictorClient(self._endpoint)
        try:
            self.info = await self._wait_ready(self._child, self._client)
        except ConfigurationError:
            client, self._client = self._client, None
            await client.close()
            await asyncio.to_thread(self.close)
            raise
        return self.info

    async def _wait_ready(self, child: Child, client: PredictorClient) -> dict[str, Any]:
        ready = asyncio.create_task(client.wait_ready(START_TIMEOUT_S))
        while not ready.done():
            await asyncio.wait([ready], timeout=0.1)
            if child.exit_code() is not None:
                ready.cancel()
                lines = child.log_tail(1) or f"it ended with code {child.exit_code()}"
                raise ConfigurationError(f"{self._kind} {self._settings.model}: {lines}")
        return await ready

    @property
    def model_name(self) -> str:
        """Name and version of the model that answers; a plain folder has no version."""
        version = self.info.get("version")
        return f"{self.info.get('name', '?')}{f' v{version}' if version else ''}"

    @property
    def description(self) -> str:
        """Name and version for status pages; says so if it is dead."""
        return "dead: history forecasts" if self._is_reported_dead else self.model_name

    async def forecast(self, request_id: str, messages: Sequence[Message]) -> LengthForecast | None:
        """The forecast of the reply to `messages`, or None when it failed. The caller bounds its own wait."""
        if self._client is None or self._child is None:
            return None
        if (code := self._child.exit_code()) is not None:
            if not self._is_reported_dead:
                self._is_reported_dead = True
                logger.error(
                    "%s ended with code %s and forecasts no more until this instance is restarted: %s",
                    self._kind,
                    code,
                    self._child.log_tail(1),
                )
            return None
        return await self._client.forecast(request_id, messages, FORECAST_TIMEOUT_S)

    def close(self) -> None:
        """Stop the process and remove its socket and log. The client's socket ends with its event loop."""
        if self._child is not None:
            self._child.stop(5.0)
        for left in self._folder.glob("*"):
            left.unlink(missing_ok=True)
        if self._folder.exists():
            self._folder.rmdir()

    def _command(self) -> tuple[str, ...]:
        settings = self._settings
        command = [sys.executable, "-m", "serving_plugin.predictor.service", "--model", str(settings.model)]
        command += ["--endpoint", self._endpoint, "--target-model", self._target_model]
        command += ["--num-threads", str(settings.num_threads), "--batch-size", str(settings.batch_size)]
        command += ["--cutting-limit-tokens", str(settings.cutting_limit_tokens)]
        if settings.tracking_uri is not None:
            command += ["--tracking-uri", settings.tracking_uri]
        if settings.allow_other_target:
            command.append("--allow-other-target")
        return tuple(command)


class ShadowPredictor:
    """A challenger that is asked beside the champion: nothing waits for it, and what goes wrong is at most a warning.

    `ask` when a request arrives, `take` when its decision is made: what is not there by then is left out and counted.
    """

    def __init__(self, settings: PredictionSettings, target_model: str) -> None:
        settings = replace(settings, model=settings.shadow_model, shadow_model=None)
        self._process = PredictorProcess(settings, target_model, "shadow predictor")
        self._uri = settings.model
        self._starting: asyncio.Task[None] | None = None
        self._is_ready = self._is_closed = False
        self._running: set[asyncio.Task[LengthForecast | None]] = set()
        self._asked: dict[str, asyncio.Task[LengthForecast | None]] = {}
        self.num_forecasts = self.num_late = self.num_failed = self.num_not_asked = 0

    def start(self) -> None:
        """Start it in the background of the running event loop; until it is ready it is not asked."""
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            info = await self._process.start()
        except (ConfigurationError, OSError) as error:
            if not self._is_closed:
                logger.warning("no shadow predictor runs: %s", error)
        else:
            self._is_ready = True
            logger.info("shadow predictor: %s", info)

    @property
    def model_name(self) -> str:
        """Name and version of the model that answers."""
        return self._process.model_name

    def ask(self, request_id: str, messages: Sequence[Message]) -> None:
        """Ask for a forecast of the reply to `messages` and return at once."""
        if not self._is_ready or len(self._running) >= MAX_SHADOW_RUNNING:
            self.num_not_asked += 1
            return
        self._keep(request_id, self._process.forecast(request_id, messages))

    def _keep(self, request_id: str, asking: Coroutine[Any, Any, LengthForecast | None]) -> None:
        task = asyncio.create_task(asking)
        self._running.add(task)
        task.add_done_callback(self._done)
        self._asked.pop(request_id, None)
        self._asked[request_id] = task
        while len(self._asked) > MAX_SHADOW_UNTAKEN:
            del self._asked[next(iter(self._asked))]

    def _done(self, task: asyncio.Task[LengthForecast | None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("shadow predictor failed: %r", task.exception())

    def take(self, request_id: str) -> LengthForecast | None:
        """The forecast asked for under this id if it is here; None and counted if it is late or failed."""
        task = self._asked.pop(request_id, None)
        if task is None:
            return None
        if not task.done():
            self.num_late += 1  # it goes on, so that what the process owes stays counted
            return None
        forecast = None if task.cancelled() or task.exception() is not None else task.result()
        if forecast is None:
            self.num_failed += 1
        else:
            self.num_forecasts += 1
        return forecast

    def status(self) -> dict[str, Any]:
        """What `/tetri/instance` shows. `num_not_asked`: before it was ready, or while it owed too many."""
        return {
            "uri": self._uri,
            "is_ready": self._is_ready,
            "info": self._process.info,
            "num_forecasts": self.num_forecasts,
            "num_late": self.num_late,
            "num_failed": self.num_failed,
            "num_not_asked": self.num_not_asked,
        }

    def close(self) -> None:
        """Stop the process; also after the event loop has ended."""
        self._is_closed = True
        self._process.close()
