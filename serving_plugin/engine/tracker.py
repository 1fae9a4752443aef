"""What TetriServe knows of each request inside EngineCore: its forecast, its range in force, its veto, its times.

No vLLM import: the scheduler hands over plain values, so the tracker is tested without an engine.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving_plugin.core.config import ForecastSettings
from serving_plugin.core.forecast import LengthForecast, LengthRange, history_forecast, refresh_range

logger = logging.getLogger(__name__)

MAX_FINISHED = 1024


@dataclass(slots=True)
class Tracked:
    """One request on this instance. Times are unix seconds.

    `vetoed_since_s`: when it was first in line and refused for lack of memory, None if that has not happened.
    `num_overtaken`: later arrivals that were admitted before it. `expected_tokens`: mean of its forecast.
    `queued_since_s`: when a gateway first sent it to a decode instance, this one or one that gave it back.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    forecast: LengthForecast
    forecast_source: str  # "model", "history" or "history:drift"
    length_range: LengthRange
    is_heavy_decode: bool
    is_remote_prefill: bool
    arrived_s: float
    expected_tokens: float = 0.0
    queued_since_s: float = 0.0
    num_overtaken: int = 0
    vetoed_since_s: float | None = None
    admitted_s: float | None = None
    first_scheduled_s: float | None = None
    transfer_start_s: float | None = None
    transfer_end_s: float | None = None
    num_remote_tokens: int = 0
    num_local_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finished_s: float | None = None


class RequestTracker:
    """Forecasts and times of the requests of one engine, with a bounded memory of finished ones."""

    def __init__(self, settings: ForecastSettings) -> None:
        self._settings = settings
        self._live: dict[str, Tracked] = {}
        self.num_heavy_decodes = 0  # among the live ones
        self._finished: deque[Tracked] = deque(maxlen=MAX_FINISHED)
        self._history_tokens: deque[int] = deque(maxlen=settings.history_size)

    def add(
        self,
        engine_id: str,
        own_id: str,
        num_prompt_tokens: int,
        max_tokens: int,
        meta: Mapping[str, Any],
        now_s: float,
    ) -> Tracked:
        """Start to follow a request; `meta` is the "tetri" part of its `kv_transfer_params`, empty for a plain one.

        Metadata that make no sense (no gateway sends such) are dropped: a bad request must not end the engine.
        """
        try:
            return self._add(engine_id, own_id, num_prompt_tokens, max_tokens, meta, now_s)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            logger.warning("request %s: its metadata are unusable (%r); history is used", own_id, error)
            return self._add(engine_id, own_id, num_prompt_tokens, max_tokens, {}, now_s)

    def _add(
        self,
        engine_id: str,
        own_id: str,
        num_prompt_tokens: int,
        max_tokens: int,
        meta: Mapping[str, Any],
        now_s: float,
    ) -> Tracked:
        forecast, source = self._forecast(meta, max_tokens)
        # A range that was decided with a forecast, whatever its source, is in force here as it was at dispatch.
        bounds = meta.get("length_range") if meta.get("forecast") is not None else None
        length_range = LengthRange(int(bounds[0]), int(bounds[1])) if bounds else self.range_of(forecast)
        heavy = meta.get("is_heavy_decode")
        tracked = Tracked(
            request_id=own_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            forecast=forecast,
            forecast_source=source,
            length_range=length_range,
            is_heavy_decode=forecast.is_heavy(self._settings.heavy_decode_over_tokens)
            if heavy is None
            else bool(heavy),
            is_remote_prefill="decode_id" in meta,
            arrived_s=now_s,
            expected_tokens=forecast.mean_tokens(),
            queued_since_s=_moment(meta.get("queued_since_s"), now_s),
        )
        self._live[engine_id] = tracked
        self.num_heavy_decodes += tracked.is_heavy_decode
        return tracked

    def range_of(self, forecast: LengthForecast) -> LengthRange:
        """The range in force for a new forecast, by the setting `forecast.range`."""
        if self._settings.range == "argmax":
            return forecast.argmax_bucket()
        return forecast.range(self._settings.coverage)

    def get(self, engine_id: str) -> Tracked | None:
        """The request, or None if it is not followed."""
        return self._live.get(engine_id)

    def engine_ids(self, own_id: str) -> list[str]:
        """The engine's ids of the live requests that a gateway calls `own_id`.

        A leg carries our id in its parameters. A request that runs whole has it only in vLLM's own id, which is made
        of the gateway's X-Request-Id, once per prompt and sample (vLLM 0.32: `cmpl-ID-PROMPT-SUFFIX`,
        `chatcmpl-ID-SUFFIX`, and `SAMPLE_` before it if there are several).
        """
        own = re.escape(own_id)
        whole = re.compile(rf"(\d+_)?(cmpl-{own}-\d+|chatcmpl-{own})-[0-9a-f]{{8}}")
        return [
            engine_id
            for engine_id, tracked in self._live.items()
            if tracked.request_id == own_id or (tracked.request_id == engine_id and whole.fullmatch(engine_id))
        ]

    def refresh(self, engine_id: str, num_output_tokens: int) -> Tracked:
        """Note the tokens put out so far; an outgrown range is replaced by the next."""
        tracked = self._live[engine_id]
        tracked.num_output_tokens = num_output_tokens
        tracked.length_range = refresh_range(
            tracked.forecast, tracked.length_range, num_output_tokens, self._settings.coverage, tracked.max_tokens
        )
        return tracked

    def finish(self, engine_id: str, num_output_tokens: int, completed: bool, now_s: float) -> Tracked | None:
        """Stop following; a completed decode enters the history that forecasts fall back to."""
        tracked = self._live.pop(engine_id, None)
        if tracked is None:
            return None
        self.num_heavy_decodes -= tracked.is_heavy_decode
        tracked.num_output_tokens = num_output_tokens
        tracked.finished_s = now_s
        self._finished.append(tracked)
        if completed and num_output_tokens > 0:
            self._history_tokens.append(num_output_tokens)
        return tracked

    def records(self) -> list[dict[str, Any]]:
        """Finished and live requests as JSON-ready dicts, oldest first."""
        return [_as_json(tracked) for tracked in (*self._finished, *self._live.values())]

    def _forecast(self, meta: Mapping[str, Any], max_tokens: int) -> tuple[LengthForecast, str]:
        raw = meta.get("forecast")
        if raw is not None:
            forecast = LengthForecast.from_weights(raw["edges_tokens"], raw["probabilities"])
            return forecast.clipped(max_tokens), str(meta.get("forecast_source", "model"))
        forecast = history_forecast(self._history_tokens, max_tokens + 1, self._settings.granularity_tokens)
        return forecast.clipped(max_tokens), "history"


def _as_json(tracked: Tracked) -> dict[str, Any]:
    return {
        "request_id": tracked.request_id,
        "num_prompt_tokens": tracked.num_prompt_tokens,
        "num_output_tokens": tracked.num_output_tokens,
        "num_remote_tokens": tracked.num_remote_tokens,
        "num_local_prompt_tokens": tracked.num_local_prompt_tokens,
        "is_remote_prefill": tracked.is_remote_prefill,
        "forecast_source": tracked.forecast_source,
        "length_range": [tracked.length_range.low_tokens, tracked.length_range.high_tokens],
        "is_heavy_decode": tracked.is_heavy_decode,
        "arrived_s": tracked.arrived_s,
        "vetoed_since_s": tracked.vetoed_since_s,
        "num_overtaken": tracked.num_overtaken,
        "admitted_s": tracked.admitted_s,
        "first_scheduled_s": tracked.first_scheduled_s,
        "transfer_start_s": tracked.transfer_start_s,
        "transfer_end_s": tracked.transfer_end_s,
        "finished_s": tracked.finished_s,
    }


def _moment(value: object, now_s: float) -> float:
    """`value` as unix seconds, if it is a moment that has been."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < now_s else now_s
