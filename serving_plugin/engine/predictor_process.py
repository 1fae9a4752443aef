"""The length predictor beside a prefill instance: its own process, one owner, an asyncio client. No vLLM import."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from serving_plugin.core.config import PredictionSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.predictor.client import PredictorClient
from serving_plugin.processes import Child, ChildSpec

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
FORECAST_TIMEOUT_S = (
    120.0  # after this nobody can still be waiting: the wait itself is bounded by `prediction.timeout_s`
)


class PredictorProcess:
    """Starts `serving_plugin.predictor.service` and asks it for forecasts."""

    def __init__(self, settings: PredictionSettings, target_model: str) -> None:
        self._settings = settings
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
            ChildSpec(
                "length predictor", self._command(), self._folder / "predictor.log", {"OMP_NUM_THREADS": "1"}, cores
            )
        )
        self._client = PredictorClient(self._endpoint)
        ready = asyncio.create_task(self._client.wait_ready(START_TIMEOUT_S))
        while not ready.done():
            await asyncio.wait([ready], timeout=0.1)
            if self._child.exit_code() is not None:
                ready.cancel()
                lines = self._child.log_tail(1) or f"it ended with code {self._child.exit_code()}"
                self.close()
                raise ConfigurationError(f"length predictor {settings.model}: {lines}")
        self.info = await ready
        return self.info

    @property
    def description(self) -> str:
        """Name and version for status pages; says so if it is dead."""
        if self._is_reported_dead:
            return "dead: history forecasts"
        return f"{self.info.get('name', '?')} v{self.info.get('version', '?')}"

    async def forecast(self, request_id: str, text: str) -> LengthForecast | None:
        """The forecast of `text`, or None when it failed. The caller bounds its own wait."""
        if self._client is None or self._child is None:
            return None
        if (code := self._child.exit_code()) is not None:
            if not self._is_reported_dead:
                self._is_reported_dead = True
                logger.error(
                    "length predictor ended with code %s; history forecasts until this instance is restarted: %s",
                    code,
                    self._child.log_tail(1),
                )
            return None
        return await self._client.forecast(request_id, text, FORECAST_TIMEOUT_S)

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
