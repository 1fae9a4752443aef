"""The nouns of the system: roles, loads, requests and their records. Frozen, slotted, standard library only.

A policy sees no more than `RequestInfo`, `InstanceLoad` and the pool's block size, so a request's true length cannot
leak into a decision. Units stand in names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from serving_plugin.core.forecast import LengthForecast, LengthRange


class Role(StrEnum):
    """What an instance does now; it can flip at run time."""

    PREFILL = "prefill"
    DECODE = "decode"


class InstanceState(StrEnum):
    """Life of an instance as the control plane sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """All that a policy may know of a request.

    `arrival_s` is in the decider's own clock. `is_heavy_decode` is frozen at dispatch; None before.
    """

    id: str
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    forecast: LengthForecast | None = None
    length_range: LengthRange | None = None
    num_output_tokens: int = 0
    is_heavy_decode: bool | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What an instance says of itself every report interval.

    Blocks are KV cache blocks of `block_size_tokens`. `num_vetoed_tokens` are prompt tokens of requests that wait for
    admission. `num_free_blocks` includes blocks that only the prefix cache holds. `is_over_pinned_budget`: a prefill
    instance holds prompts back, since KV that waits to be pulled would fill more than its share of the pool.
    """

    id: str
    incarnation: str
    role: Role
    role_epoch: int
    state: InstanceState
    sequence: int
    num_waiting: int
    num_loading: int
    num_running: int
    num_waiting_prompt_tokens: int
    num_vetoed_tokens: int
    num_total_blocks: int
    num_free_blocks: int
    num_pinned_blocks: int
    block_size_tokens: int
    num_heavy_decodes: int
    num_light_decodes: int
    busy_fraction: float
    is_over_pinned_budget: bool = False

    @property
    def num_active(self) -> int:
        """Requests running, loading or loaded and waiting to run."""
        return self.num_running + self.num_loading


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What metrics are made of: one request's life, identical from live runs and simulation.

    Times are seconds on one clock (the recorder's), None where the event did not happen. `token_times_s` are arrivals
    of output tokens at the client, empty when not recorded. `whole_reason` says why a request was not split, if so.
    """

    id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    outcome: Outcome
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    forecast_ready_s: float | None = None
    dispatch_s: float | None = None
    transfer_start_s: float | None = None
    transfer_end_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    length_range: LengthRange | None = None
    whole_reason: str | None = None
    error: str | None = None
    workload_class: str | None = None
    token_times_s: tuple[float, ...] = field(default=())


def num_blocks(num_tokens: int, block_size_tokens: int) -> int:
    """`ceil(num_tokens / block_size_tokens)`: KV blocks that hold so many tokens."""
    return -(-num_tokens // block_size_tokens)
