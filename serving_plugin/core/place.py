"""Place: which prefill instance a new request goes to. Pure functions of a snapshot; standard library only.

Definitions: docs/definitions.md, "Placement and dispatch". Source: TetriInfer 3.2, the global scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from serving_plugin.core.types import InstanceLoad, InstanceState, RequestInfo, Role


class PlacePolicy(Protocol):
    """Returns the id of the instance that prefills `request`, or None when none may take it now."""

    def __call__(
        self, request: RequestInfo, loads: Sequence[InstanceLoad], sent_tokens: Mapping[str, int]
    ) -> str | None: ...


def least_load(request: RequestInfo, loads: Sequence[InstanceLoad], sent_tokens: Mapping[str, int]) -> str | None:
    """The READY prefill instance within its pinned budget with fewest prompt tokens ahead; ties by id.

    Args:
        request: Not looked at: a prompt weighs the same wherever it goes.
        sent_tokens: Prompt tokens this gateway sent to each instance since the instance's last report.
    """
    candidates = [
        load
        for load in loads
        if load.role is Role.PREFILL and load.state is InstanceState.READY and not load.is_over_pinned_budget
    ]
    if not candidates:
        return None
    best = min(candidates, key=lambda load: (load.num_waiting_prompt_tokens + sent_tokens.get(load.id, 0), load.id))
    return best.id


PLACE_POLICIES: dict[str, PlacePolicy] = {"least_load": least_load}
