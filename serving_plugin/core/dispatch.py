"""Dispatch: which decode instance takes a prefilled request. Pure functions of a snapshot; standard library only.

Definitions: docs/definitions.md, "Placement and dispatch". Source: TetriInfer 3.3.4. The paper's dispatcher sees loads
up to 100 ms old; `promised` (ours) adds what this dispatcher gave away since, so that a burst does not pile up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import InstanceLoad, InstanceState, RequestInfo, Role, num_blocks


@dataclass(frozen=True, slots=True)
class Promise:
    """What one dispatcher gave to an instance since that instance's last report."""

    num_blocks: int = 0
    num_heavy: int = 0
    num_light: int = 0

    def __add__(self, other: Promise) -> Promise:
        return Promise(
            self.num_blocks + other.num_blocks, self.num_heavy + other.num_heavy, self.num_light + other.num_light
        )


DispatchPolicy = Callable[[RequestInfo, Sequence[InstanceLoad], Mapping[str, Promise], random.Random], str | None]

NO_PROMISE = Promise()


def promise_for(request: RequestInfo, block_size_tokens: int) -> Promise:
    """What dispatching `request` promises away: `blocks(prompt + high)` and its class."""
    heavy = _is_heavy(request)
    return Promise(_peak_blocks(request, block_size_tokens), int(heavy), int(not heavy))


def room_blocks(load: InstanceLoad, promise: Promise = NO_PROMISE) -> int:
    """Blocks nobody has a claim on: free, less what is promised and what vetoed requests wait for. May be negative."""
    return load.num_free_blocks - promise.num_blocks - num_blocks(load.num_vetoed_tokens, load.block_size_tokens)


def power_of_two(
    request: RequestInfo,
    loads: Sequence[InstanceLoad],
    promised: Mapping[str, Promise],
    rng: random.Random,
) -> str | None:
    """Of two random instances with room for the request at its longest, the one with fewer heavy per light decodes.

    "Fewer" is the smaller (heavy + 1) / (light + 1) after taking the request; then more room, then id. When no instance
    has such room, two of all READY ones are drawn and the roomier wins.
    """
    heavy = _is_heavy(request)

    def interference(num_heavy: int, num_light: int) -> float:
        return (num_heavy + heavy + 1) / (num_light + (not heavy) + 1)

    return _of_two(request, loads, promised, rng, interference)


def power_of_two_by_class(
    request: RequestInfo,
    loads: Sequence[InstanceLoad],
    promised: Mapping[str, Promise],
    rng: random.Random,
) -> str | None:
    """Of two random instances with room for the request at its longest, the one with fewer of its own class (ours).

    Heavy and light decodes are each spread evenly, which is what least interference asks for. `power_of_two` follows
    their ratio: lowest where most light ones are, so that it sends the next light one there as well.
    """
    heavy = _is_heavy(request)

    def num_alike(num_heavy: int, num_light: int) -> int:
        return num_heavy if heavy else num_light

    return _of_two(request, loads, promised, rng, num_alike)


def _of_two(
    request: RequestInfo,
    loads: Sequence[InstanceLoad],
    promised: Mapping[str, Promise],
    rng: random.Random,
    worse: Callable[[int, int], float],
) -> str | None:
    """Of two random instances with room, the one with the smaller `worse(heavy, light)`; then more room, then id.

    `worse` sees decodes active, queued and promised. When no instance has room for the request at its longest, two of
    all READY ones are drawn and the roomier wins.
    """
    ready = _ready(loads)
    alpha = [x for x in ready if _room(x, promised) >= _peak_blocks(request, x.block_size_tokens)]

    def by_room(load: InstanceLoad) -> tuple[int, str]:
        return -_room(load, promised), load.id

    def by_load(load: InstanceLoad) -> tuple[float, int, str]:
        promise = promised.get(load.id, NO_PROMISE)
        num_heavy, num_light = load.num_heavy_decodes + promise.num_heavy, load.num_light_decodes + promise.num_light
        return worse(num_heavy, num_light), *by_room(load)

    if alpha:
        return min(_draw_two(alpha, rng), key=by_load).id
    return min(_draw_two(ready, rng), key=by_room).id if ready else None


def random_choice(
    request: RequestInfo,
    loads: Sequence[InstanceLoad],
    promised: Mapping[str, Promise],
    rng: random.Random,
) -> str | None:
    """Uniform over READY decode instances."""
    ready = _ready(loads)
    return rng.choice(ready).id if ready else None


def imbalance(
    request: RequestInfo,
    loads: Sequence[InstanceLoad],
    promised: Mapping[str, Promise],
    rng: random.Random,
) -> str | None:
    """Negative control: all heavy requests on the first READY instance, light ones round robin over the rest.

    The turn is the number of light decodes active or promised, so the round robin needs no memory.
    Source: TetriInfer figure 19.
    """
    ready = _ready(loads)
    if not ready:
        return None
    first, *rest = ready
    if _is_heavy(request) or not rest:
        return first.id
    num_light = sum(x.num_light_decodes + promised.get(x.id, NO_PROMISE).num_light for x in ready)
    return rest[num_light % len(rest)].id


def least_load(
    request: RequestInfo,
    loads: Sequence[InstanceLoad],
    promised: Mapping[str, Promise],
    rng: random.Random,
) -> str | None:
    """The READY decode instance with most room; ties by id."""
    ready = _ready(loads)
    return min(ready, key=lambda x: (-_room(x, promised), x.id)).id if ready else None


def _ready(loads: Sequence[InstanceLoad]) -> list[InstanceLoad]:
    # Sorted, so that the order in which reports came in cannot change what a seeded generator draws.
    ready = (x for x in loads if x.role is Role.DECODE and x.state is InstanceState.READY)
    return sorted(ready, key=lambda x: x.id)


def _draw_two(candidates: list[InstanceLoad], rng: random.Random) -> list[InstanceLoad]:
    return rng.sample(candidates, 2) if len(candidates) > 2 else candidates


def _room(load: InstanceLoad, promised: Mapping[str, Promise]) -> int:
    return room_blocks(load, promised.get(load.id, NO_PROMISE))


def _peak_blocks(request: RequestInfo, block_size_tokens: int) -> int:
    return num_blocks(request.num_prompt_tokens + _range(request).high_tokens, block_size_tokens)


def _range(request: RequestInfo) -> LengthRange:
    if request.length_range is None:
        raise ValueError(f"request {request.id} has no length range: dispatch needs one, from the history if need be")
    return request.length_range


def _is_heavy(request: RequestInfo) -> bool:
    if request.is_heavy_decode is None:
        raise ValueError(f"request {request.id} is neither heavy nor light: dispatch needs its class")
    return request.is_heavy_decode


DISPATCH_POLICIES: dict[str, DispatchPolicy] = {
    "power_of_two": power_of_two,
    "power_of_two_by_class": power_of_two_by_class,
    "random": random_choice,
    "imbalance": imbalance,
    "least_load": least_load,
}
