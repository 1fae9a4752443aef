"""Which decode instance takes a prefilled request: `core.dispatch` over the last broadcast and our own promises.

Runs in the API server of the prefill instance (TetriInfer 3.3.4). No vLLM import.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serving_plugin.core.admit import can_ever_fit
from serving_plugin.core.config import DispatchSettings, ForecastSettings
from serving_plugin.core.dispatch import Promise, promise_for, room_blocks
from serving_plugin.core.forecast import LengthForecast, LengthRange, history_forecast
from serving_plugin.core.registry import resolve_policy
from serving_plugin.core.types import InstanceLoad, InstanceState, RequestInfo, Role


@dataclass(slots=True)
class _Promised:
    """Promises to one instance since its report number `sequence`."""

    incarnation: str
    sequence: int
    promise: Promise = field(default_factory=Promise)


class Dispatcher:
    """Holds the load table and the promises; `choose` decides. Used from one event loop, updated by whole tables."""

    def __init__(self, settings: DispatchSettings, forecast: ForecastSettings) -> None:
        self._policy = resolve_policy("dispatch", settings.policy)
        self._forecast = forecast
        self._rng = random.Random(settings.seed)
        self._loads: tuple[InstanceLoad, ...] = ()
        self._urls: Mapping[str, str] = {}
        self._history_tokens: Sequence[int] = ()
        self._distrusting: frozenset[str] = frozenset()
        self._promised: dict[str, _Promised] = {}

    def update(self, loads: Sequence[InstanceLoad], urls: Mapping[str, str]) -> None:
        """Take a new table as a whole; called from the connection's thread."""
        self._urls, self._loads = dict(urls), tuple(loads)

    def update_history(self, finished_lengths_tokens: Sequence[int]) -> None:
        """Recent output lengths of the cluster: what a request without a forecast is judged by."""
        self._history_tokens = tuple(finished_lengths_tokens)

    def update_trust(self, gateway: str, is_trusted: bool) -> None:
        """What `gateway` says of the model's forecasts; called from the connection's thread, like `update`."""
        others = self._distrusting - {gateway}
        self._distrusting = others if is_trusted else others | {gateway}

    @property
    def distrusting_gateways(self) -> tuple[str, ...]:
        """Connected gateways whose drift watch says that history should take the model's place."""
        return tuple(sorted(self._distrusting))

    def classify(
        self, forecast: LengthForecast | None, max_tokens: int
    ) -> tuple[LengthForecast, str, LengthRange, bool]:
        """(forecast in force, its source, range in force, heavy decode) for a request limited to `max_tokens`.

        With `forecast.range` argmax the forecast in force is the paper's: one bucket of `granularity_tokens`. Sources:
        "model"; "history" for want of a forecast; "history:drift" while any connected gateway distrusts forecasts.
        """
        settings = self._forecast
        is_argmax = settings.range == "argmax"
        if forecast is None or self._distrusting:
            base = history_forecast(self._history_tokens, max_tokens + 1, settings.granularity_tokens)
            source = "history" if forecast is None else "history:drift"
        else:
            base, source = forecast.regrouped(settings.granularity_tokens) if is_argmax else forecast, "model"
        if is_argmax:
            base = LengthForecast.one_hot(base.argmax_bucket())
        clipped = base.clipped(max_tokens)
        is_heavy = clipped.is_heavy(settings.heavy_decode_over_tokens)
        return clipped, source, clipped.range(settings.coverage), is_heavy

    def choose(self, request: RequestInfo, exclude: frozenset[str] = frozenset()) -> tuple[str, str] | None:
        """(id, base URL) of the decode instance for `request`, or None when no READY one is known.

        `exclude`: instances that already failed this request; our table may not know yet. Instances whose whole pool is
        too small for the request at its longest are left out.
        """
        known = self._loads
        self._drop_outdated_promises(known)
        loads = tuple(
            load for load in known if load.role is Role.DECODE and load.id not in exclude and _could_hold(request, load)
        )
        promised = {instance_id: kept.promise for instance_id, kept in self._promised.items()}
        chosen = self._policy(request, loads, promised, self._rng)
        if chosen is None or chosen not in self._urls:
            return None
        self._promise(next(load for load in loads if load.id == chosen), request)
        return chosen, self._urls[chosen]

    def can_ever_fit(self, request: RequestInfo) -> bool:
        """Whether some decode instance that we know of is large enough; True while none is known."""
        decoding = [load for load in self._loads if load.role is Role.DECODE]
        return not decoding or any(_could_hold(request, load) for load in decoding)

    def room_elsewhere_tokens(self, own_id: str) -> int | None:
        """Tokens that fit the roomiest READY decode instance other than `own_id`; None if there is none with room."""
        rooms = [
            room_blocks(load) * load.block_size_tokens
            for load in self._loads
            if load.id != own_id and load.role is Role.DECODE and load.state is InstanceState.READY
        ]
        most = max(rooms, default=0)
        return most if most > 0 else None

    def _drop_outdated_promises(self, loads: Sequence[InstanceLoad]) -> None:
        current = {load.id: (load.incarnation, load.sequence) for load in loads}
        self._promised = {
            instance_id: kept
            for instance_id, kept in self._promised.items()
            if current.get(instance_id) == (kept.incarnation, kept.sequence)
        }

    def _promise(self, load: InstanceLoad, request: RequestInfo) -> None:
        kept = self._promised.setdefault(load.id, _Promised(load.incarnation, load.sequence))
        kept.promise += promise_for(request, load.block_size_tokens)


def _could_hold(request: RequestInfo, load: InstanceLoad) -> bool:
    return can_ever_fit(request.num_prompt_tokens, request.max_tokens, load.block_size_tokens, load.num_total_blocks)
