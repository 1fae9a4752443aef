"""Order: which queued prompts a prefill instance serves next. Pure functions of the queue; standard library only.

Definitions: docs/definitions.md, "Order and chunks on a prefill instance". Source: TetriInfer 3.3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from serving_plugin.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A request in the prefill queue, as far as its place in the order depends on it."""

    id: str
    arrival_s: float
    num_prompt_tokens_left: int


OrderPolicy = Callable[[Sequence[QueuedPrompt]], list[QueuedPrompt]]


def fcfs(round: Sequence[QueuedPrompt]) -> list[QueuedPrompt]:
    """First come, first served; prompts that arrived together keep their order."""
    return sorted(round, key=lambda prompt: prompt.arrival_s)


def sjf(round: Sequence[QueuedPrompt]) -> list[QueuedPrompt]:
    """Fewest prompt tokens left first; ties by arrival."""
    return sorted(round, key=lambda prompt: (prompt.num_prompt_tokens_left, prompt.arrival_s))


def ljf(round: Sequence[QueuedPrompt]) -> list[QueuedPrompt]:
    """Most prompt tokens left first; ties by arrival."""
    return sorted(round, key=lambda prompt: (-prompt.num_prompt_tokens_left, prompt.arrival_s))


ORDER_POLICIES: dict[str, OrderPolicy] = {"fcfs": fcfs, "sjf": sjf, "ljf": ljf}


def left_of_current_round(rounds: Sequence[Sequence[str]], waiting: Container[str]) -> list[str]:
    """What is left of the last of `rounds` that has begun, and before it what was skipped of those ahead of it.

    `rounds`: ids as they were offered last, in order; a round has begun once one of its members waits no more. Whoever
    came since then is in none of them, and joins the next.
    """
    has_begun = [any(id not in waiting for id in ids) for ids in rounds]
    current = max((number for number, begun in enumerate(has_begun) if begun), default=0)
    return [id for ids in rounds[: current + 1] for id in ids if id in waiting]


def next_round(
    queue: Sequence[QueuedPrompt], current_round_ids: Sequence[str], policy: OrderPolicy, sched_batch: int
) -> list[str]:
    """The ids to serve now, in order: what is left of the current round, else a new round. Never waits to fill one.

    A later arrival joins the next round at the earliest, so nobody is overtaken by more than `sched_batch - 1` later
    requests. Preempted requests are served before the round and are no part of `queue`.

    Raises:
        ConfigurationError: `sched_batch` is below 1.
    """
    if sched_batch < 1:
        raise ConfigurationError(f"order.sched_batch={sched_batch}: must be 1 or more")
    queued_ids = {prompt.id for prompt in queue}
    left = [id for id in current_round_ids if id in queued_ids]
    return left or [prompt.id for prompt in policy(fcfs(queue)[:sched_batch])]
