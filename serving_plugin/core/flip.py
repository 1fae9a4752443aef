"""Flip: which instance should change its role, if any. Pure functions of loads, memory and time; standard library only.

The caller keeps the returned `FlipState` and hands it back with the next loads; a policy has no memory of its own. A
decision is a wish: the instance judges whether and when it has drained, and its role epoch tells that it flipped.
Definitions: docs/definitions.md, "When to flip". Source: TetriInfer 3.5 ("under 10 % for the past minute").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import InstanceLoad, InstanceState, Role


@dataclass(frozen=True, slots=True)
class FlipSettings:
    """When a role is worth changing. Every flip policy reads the first four; `smoothing_s` is for `smoothed`."""

    under_busy_fraction: float = 0.10
    under_for_s: float = 60.0
    min_dwell_s: float = 60.0
    drain_timeout_s: float = 60.0
    smoothing_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0.0 < self.under_busy_fraction <= 1.0:
            raise ConfigurationError(f"flip.under_busy_fraction={self.under_busy_fraction}: must be in (0, 1]")
        for name in ("under_for_s", "min_dwell_s", "drain_timeout_s"):
            if not getattr(self, name) >= 0.0:
                raise ConfigurationError(f"flip.{name}={getattr(self, name)}: must be 0 seconds or more")
        if not self.smoothing_s > 0.0:
            raise ConfigurationError(f"flip.smoothing_s={self.smoothing_s}: must be above 0 seconds")


@dataclass(frozen=True, slots=True)
class DemandSnapshot:
    """What requests in flight are forecast to need: KV tokens on decode instances, prompts and outputs to come."""

    num_decode_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class InstanceTrack:
    """What one gateway remembers of one instance in its present role.

    `role_since_s`: when this incarnation and role epoch was first seen. `under_since_s`: when its load first fell under
    the threshold and stayed there, None while it is over. `busy_fraction`: the last one, or the smoothed one.
    """

    incarnation: str
    role_epoch: int
    role_since_s: float
    seen_s: float
    busy_fraction: float
    under_since_s: float | None


@dataclass(frozen=True, slots=True)
class PendingFlip:
    """A flip that was decided and has not shown in a report yet."""

    instance_id: str
    incarnation: str
    role_epoch: int
    decided_s: float


@dataclass(frozen=True, slots=True)
class FlipState:
    """Memory of a flip policy, one per gateway. Start with `FlipState()`."""

    tracks: Mapping[str, InstanceTrack] = field(default_factory=dict)
    pending: PendingFlip | None = None


@dataclass(frozen=True, slots=True)
class FlipDecision:
    """One instance should drain and take the other role; `reason` is one line for the log."""

    instance_id: str
    to_role: Role
    reason: str


FlipPolicy = Callable[
    [Sequence[InstanceLoad], DemandSnapshot, FlipState, float, FlipSettings], tuple[FlipDecision | None, FlipState]
]


def hysteresis(
    loads: Sequence[InstanceLoad], demand: DemandSnapshot, state: FlipState, now_s: float, settings: FlipSettings
) -> tuple[FlipDecision | None, FlipState]:
    """Flip the instance that has been idle longest, once its load has stayed under the threshold for long enough.

    Never empties a role of READY instances; at most one flip in flight; nobody flips into a role that idles too.
    """
    state = _observe(loads, state, now_s, settings, smoothing_s=None)
    return _decide(_longest_idle(loads, state, now_s, settings), state, now_s)


def smoothed(
    loads: Sequence[InstanceLoad], demand: DemandSnapshot, state: FlipState, now_s: float, settings: FlipSettings
) -> tuple[FlipDecision | None, FlipState]:
    """As hysteresis, on the exponentially smoothed load: one busy report does not start the time anew."""
    state = _observe(loads, state, now_s, settings, smoothing_s=settings.smoothing_s)
    return _decide(_longest_idle(loads, state, now_s, settings), state, now_s)


def predicted_demand(
    loads: Sequence[InstanceLoad], demand: DemandSnapshot, state: FlipState, now_s: float, settings: FlipSettings
) -> tuple[FlipDecision | None, FlipState]:
    """Flip the least busy prefill instance to decode as soon as the forecast outgrows the decode instances' KV.

    Back to prefill as hysteresis does, but only if the decode instances that remain still hold the forecast.
    """
    state = _observe(loads, state, now_s, settings, smoothing_s=None)
    capacity = sum(_kv_tokens(load) for load in _ready(loads, Role.DECODE))
    decision = None
    if demand.num_decode_kv_tokens > capacity:
        candidates = _dwelt(_spare(loads, Role.PREFILL), state, now_s, settings)
        if candidates:
            chosen = min(candidates, key=lambda x: (x.busy_fraction, x.id))
            reason = f"forecast needs {demand.num_decode_kv_tokens} KV tokens, decode instances hold {capacity}"
            decision = FlipDecision(chosen.id, Role.DECODE, reason)
    else:
        decision = _longest_idle(loads, state, now_s, settings, keep_kv_tokens=demand.num_decode_kv_tokens)
    return _decide(decision, state, now_s)


def _observe(
    loads: Sequence[InstanceLoad], state: FlipState, now_s: float, settings: FlipSettings, smoothing_s: float | None
) -> FlipState:
    """The state after these reports: instances that are gone or changed start anew, a settled flip is forgotten."""
    tracks = {load.id: _track(load, state.tracks.get(load.id), now_s, settings, smoothing_s) for load in loads}
    pending = state.pending
    if pending is not None:
        track = tracks.get(pending.instance_id)
        same = track is not None and (track.incarnation, track.role_epoch) == (pending.incarnation, pending.role_epoch)
        if not same or now_s - pending.decided_s > settings.drain_timeout_s:
            pending = None
    return FlipState(tracks, pending)


def _track(
    load: InstanceLoad, before: InstanceTrack | None, now_s: float, settings: FlipSettings, smoothing_s: float | None
) -> InstanceTrack:
    busy, role_since_s, under_since_s = load.busy_fraction, now_s, None
    if before is not None and (before.incarnation, before.role_epoch) == (load.incarnation, load.role_epoch):
        role_since_s, under_since_s = before.role_since_s, before.under_since_s
        if smoothing_s is not None:
            weight = 1.0 - math.exp(-max(0.0, now_s - before.seen_s) / smoothing_s)
            busy = before.busy_fraction + weight * (busy - before.busy_fraction)
    if busy >= settings.under_busy_fraction or load.state is not InstanceState.READY:
        under_since_s = None
    elif under_since_s is None:
        under_since_s = now_s
    return InstanceTrack(load.incarnation, load.role_epoch, role_since_s, now_s, busy, under_since_s)


def _longest_idle(
    loads: Sequence[InstanceLoad],
    state: FlipState,
    now_s: float,
    settings: FlipSettings,
    keep_kv_tokens: int = 0,
) -> FlipDecision | None:
    """The flip that hysteresis asks for, if any; decode instances keep room for `keep_kv_tokens`."""
    candidates: list[tuple[float, str, InstanceLoad]] = []
    capacity = sum(_kv_tokens(load) for load in _ready(loads, Role.DECODE))
    for role in Role:
        if any(state.tracks[other.id].under_since_s is not None for other in _ready(loads, _other(role))):
            continue  # the other role idles too: a flip would help nobody
        for load in _dwelt(_spare(loads, role), state, now_s, settings):
            under_since_s = state.tracks[load.id].under_since_s
            if under_since_s is None or now_s - under_since_s < settings.under_for_s:
                continue
            if role is Role.DECODE and capacity - _kv_tokens(load) < keep_kv_tokens:
                continue
            candidates.append((under_since_s, load.id, load))
    if not candidates:
        return None
    under_since_s, _, chosen = min(candidates, key=lambda candidate: candidate[:2])
    reason = f"busy under {settings.under_busy_fraction:.0%} for {now_s - under_since_s:.0f} s"
    return FlipDecision(chosen.id, _other(chosen.role), reason)


def _decide(decision: FlipDecision | None, state: FlipState, now_s: float) -> tuple[FlipDecision | None, FlipState]:
    """Let `decision` through unless a flip is in flight already, and remember it until it shows in a report."""
    if decision is None or state.pending is not None:
        return None, state
    track = state.tracks[decision.instance_id]
    pending = PendingFlip(decision.instance_id, track.incarnation, track.role_epoch, now_s)
    # Should the instance abandon the flip, it has to dwell again before the next try.
    tracks = {**state.tracks, decision.instance_id: replace(track, role_since_s=now_s, under_since_s=None)}
    return decision, FlipState(tracks, pending)


def _ready(loads: Sequence[InstanceLoad], role: Role) -> list[InstanceLoad]:
    return [load for load in loads if load.role is role and load.state is InstanceState.READY]


def _spare(loads: Sequence[InstanceLoad], role: Role) -> list[InstanceLoad]:
    """READY instances of `role` of which one may leave: none if it were the last."""
    ready = _ready(loads, role)
    return ready if len(ready) > 1 else []


def _dwelt(loads: Sequence[InstanceLoad], state: FlipState, now_s: float, settings: FlipSettings) -> list[InstanceLoad]:
    return [load for load in loads if now_s - state.tracks[load.id].role_since_s >= settings.min_dwell_s]


def _kv_tokens(load: InstanceLoad) -> int:
    return load.num_total_blocks * load.block_size_tokens


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


FLIP_POLICIES: dict[str, FlipPolicy] = {
    "hysteresis": hysteresis,
    "smoothed": smoothed,
    "predicted_demand": predicted_demand,
}
