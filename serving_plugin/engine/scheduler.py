"""TetriServe's policies inside vLLM's scheduler: a mixin over both scheduler classes (plain on CPU, async on GPU).

One idea: before each step, `self.waiting` is swapped for the requests that the policies admit, in the policies' order;
vLLM schedules that queue as it always does; afterwards the full queue is restored in arrival order. vLLM never asks per
request, blocks stay unallocated until admission, and aborts and counts outside the step see the whole queue. A decode
instance's queue is judged when something has changed (a request came, ended or was preempted) or `JUDGE_EVERY_STEPS`
later, and loads are published when they are due, so that a step costs little however many requests run.
Source: TetriInfer 3.3.1 (order, chunk) and 3.4 (admission). vLLM 0.32.0 internals: `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from serving_plugin.core.admit import ActiveDecode, Candidate, DecodePool, Newcomer, QueueRules, admit_queue
from serving_plugin.core.chunk import step_token_budget
from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.order import QueuedPrompt, left_of_current_round, next_round
from serving_plugin.core.registry import resolve_policy
from serving_plugin.core.types import Role, num_blocks
from serving_plugin.engine.ledger import take_ledger
from serving_plugin.engine.load_feed import EngineSnapshot, LoadPublisher, TransferEvent, unix_now_s
from serving_plugin.engine.queue_watch import Withdrawal
from serving_plugin.engine.settings import settings_of
from serving_plugin.engine.token_account import TokenAccount
from serving_plugin.engine.tracker import RequestTracker, Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _SchedulerBase
else:
    _SchedulerBase = object  # a mixin over both of vLLM's classes


JUDGE_EVERY_STEPS = 8
MAX_CACHE_LOOKUPS = 64  # prefix lookups per judgement of a queue; who stands further behind is judged without
# A snapshot is shipped every report interval; one that is a quarter of it old is as good as new.
PUBLISH_INTERVAL_SHARE = 0.25
# Requests in these states hold no block: nothing has been computed or loaded for them.
_UNTOUCHED = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
_WAITING = (*_UNTOUCHED, RequestStatus.PREEMPTED)


class TetriSchedulerMixin(_SchedulerBase):
    """Order, chunk and admission around vLLM's `schedule`; publishes loads; keeps the request tracker."""

    waiting: Any  # vLLM's RequestQueue

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.policy is not SchedulingPolicy.FCFS:
            raise ConfigurationError(
                f"--scheduling-policy {self.policy.value}: TetriServe orders the queue itself; leave it at fcfs"
            )
        self._max_step_tokens: int = self.max_num_scheduled_tokens  # vLLM's own; each step gets a bound of its own
        self._tokens = TokenAccount()
        self.configure(settings_of(self.vllm_config))
        self._must_judge = True
        self._num_steps_unjudged = 0
        self._is_held_back = False  # the next prompt would go over the pinned budget
        self._prefill_busy_s = 0.0
        self._busy_until_s = 0.0
        # Start of each step under way, None without prompt tokens.
        self._prefill_steps: deque[float | None] = deque(maxlen=8)
        self._published_s = 0.0
        self._publisher = LoadPublisher(
            self.vllm_config.kv_transfer_config.engine_id, self.tetri_settings.report_interval_s
        )
        self._publish()

    def configure(self, settings: InstanceSettings) -> None:
        """Take role, policies and bounds from `settings`, with a fresh tracker; nothing may be in flight.

        Raises:
            ConfigurationError: a policy is unknown, or requests are in flight.
        """
        if self.requests:
            raise ConfigurationError(f"{len(self.requests)} requests are in flight: drain the instance first")
        order = resolve_policy("order", settings.order.policy)
        chunk = resolve_policy("chunk", settings.chunk.policy)
        admit = resolve_policy("admit", settings.admit.policy)
        self._order, self._chunk, self._admit = order, chunk, admit
        self.tetri_settings = settings
        self.tetri_role = settings.role
        self.tetri_tracker = RequestTracker(settings.forecast)
        self._rounds: list[list[str]] = []  # of prompts, as they were offered last

    def set_chunk_tokens(self, chunk_tokens: int) -> None:
        """Another bound for the prompt tokens of a step, from the next step on; 0: vLLM's own.

        Raises:
            ConfigurationError: below 0.
        """
        chunk = replace(self.tetri_settings.chunk, chunk_tokens=chunk_tokens)
        self.tetri_settings = replace(self.tetri_settings, chunk=chunk)

    # What vLLM calls

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step: offer the admissible queue, let vLLM schedule it, restore the full queue."""
        full = self.waiting
        if not full:
            self.max_num_scheduled_tokens = self._step_token_budget(())
            output = super().schedule(*args, **kwargs)  # preempted requests join the queue, which is empty
            self._must_judge |= bool(self.waiting)
            self._is_held_back = False
            self._after_schedule(output, ())
            return output
        waiting = list(full)
        offered = self._offered(waiting)
        self.max_num_scheduled_tokens = self._step_token_budget(offered)
        self.waiting = _queue_of(self.policy, offered)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            left = self.waiting
            self.waiting = full
            if offered or left:
                _restore(full, waiting, offered, list(left))
        self._must_judge |= bool(left)  # offered and not taken, or preempted
        if offered and self.tetri_role is Role.DECODE:
            self._note_overtaken(offered)
        self._after_schedule(output, offered)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's bookkeeping of a finished step, then loads and transfer times."""
        started_s = self._prefill_steps.popleft() if self._prefill_steps else None
        if started_s is not None:
            now_s = time.monotonic()
            self._prefill_busy_s += now_s - max(started_s, self._busy_until_s)  # async steps overlap
            self._busy_until_s = now_s
        result = super().update_from_output(scheduler_output, model_runner_output)
        self._publish_if_due()
        return result

    def add_request(self, request: Request) -> None:
        """Follow the request from here; its forecast comes with its `kv_transfer_params`."""
        if request.request_id not in self.requests:
            meta = _metadata(request) or {}
            self.tetri_tracker.add(
                request.request_id,
                str(meta.get("request_id", request.request_id)),
                request.num_prompt_tokens,
                max(1, request.max_tokens),
                meta,
                unix_now_s(),
            )
        super().add_request(request)
        self._must_judge = True
        self._publish_if_due()

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """Aborts from outside; loads change with them."""
        finished = super().finish_requests(*args, **kwargs)
        self._publish()
        return finished

    def shutdown(self) -> None:
        """Stop the load feed with the scheduler."""
        self._publisher.close()
        super().shutdown()

    # Hooks into vLLM's internals (0.32.0), each named after the method it wraps

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._must_judge = True
        self._published_s = 0.0
        self._tokens.forget(request.request_id)
        completed = request.status != RequestStatus.FINISHED_ABORTED and self.tetri_role is Role.DECODE
        self.tetri_tracker.finish(request.request_id, request.num_output_tokens, completed, unix_now_s())
        return super()._free_request(request, *args, **kwargs)

    def _free_blocks(self, request: Request) -> None:
        # Also where KV was held for a peer, or a load ended after an abort: `_free_request` came long before.
        super()._free_blocks(request)
        self._must_judge = True
        self._published_s = 0.0

    def _drain_deferred_frees(self) -> None:
        num_deferred = len(self.deferred_frees)
        super()._drain_deferred_frees()
        if len(self.deferred_frees) < num_deferred:
            self._must_judge = True
            self._published_s = 0.0

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        num_computed_tokens = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)
        self._tokens.lose(request.request_id, num_computed_tokens)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        failed = request.request_id in self.failed_recving_kv_req_ids
        super()._update_waiting_for_remote_kv(request)
        self._must_judge = True
        tracked = self.tetri_tracker.get(request.request_id)
        if tracked is None or tracked.transfer_start_s is None:
            return
        tracked.transfer_end_s = unix_now_s()
        tracked.num_remote_tokens = 0 if failed else request.num_prompt_tokens
        self._tokens.load(tracked.num_remote_tokens)
        self._publisher.add_event(
            TransferEvent(
                tracked.request_id, tracked.transfer_start_s, tracked.transfer_end_s, tracked.num_remote_tokens
            )
        )

    # Decisions, all of them in core

    def _step_token_budget(self, offered: Sequence[Request]) -> int:
        """Decodes plus one chunk, as long as the chunk policy makes it of the prompts in their order."""
        chunk_tokens = self.tetri_settings.chunk.chunk_tokens
        limit = self._max_step_tokens
        if chunk_tokens == 0:
            return limit
        prefilling = [request for request in self.running if request.is_prefill_chunk]
        prompt_tokens_left = [
            max(0, request.num_tokens - request.num_computed_tokens) for request in (*prefilling, *offered)
        ]
        # A loaded request has its last prompt token to compute: vLLM takes it off the count inside its step.
        loaded_tokens_left = [
            max(1, request.num_tokens - request.num_computed_tokens) for request in self.kv_holding_waiting
        ]
        num_prompt_tokens = sum(self._chunk([*loaded_tokens_left, *prompt_tokens_left], chunk_tokens))
        num_decodes = len(self.running) - len(prefilling) - sum(map(_ends_with_step_under_way, self.running))
        num_decode_tokens = num_decodes * (1 + self.num_spec_tokens)
        return step_token_budget(num_decode_tokens, max(1, num_prompt_tokens), limit)

    def _offered(self, waiting: list[Request]) -> list[Request]:
        """The requests that vLLM may schedule now, in order: preempted ones first, then what the role's policy says."""
        returning = [request for request in waiting if request.status == RequestStatus.PREEMPTED]
        fresh = [request for request in waiting if request.status != RequestStatus.PREEMPTED] if returning else waiting
        if self.tetri_role is Role.PREFILL:
            ordered = self._ordered(fresh)
            within = self._within_pinned_budget(ordered, returning)
            if self._is_held_back:  # who is held back shall not use up the step of those that nobody will pull
                seen = {request.request_id for request in ordered}
                free = (request for request in fresh if not _is_held_for_peer(request))
                within += (request for request in free if request.request_id not in seen)
            return returning + within
        self._num_steps_unjudged += 1
        if not self._must_judge and self._num_steps_unjudged < JUDGE_EVERY_STEPS:
            return returning
        num_seats = self.max_num_running_reqs - len(self.running) - len(self.kv_holding_waiting) - len(returning)
        if not fresh or num_seats <= 0:
            return returning
        self._must_judge, self._num_steps_unjudged = False, 0
        return returning + self._admissible(fresh, returning, num_seats)

    def _within_pinned_budget(self, ordered: list[Request], returning: list[Request]) -> list[Request]:
        """Those whose KV cache, waiting to be pulled, stays within its share of the pool; one alone is always taken.

        Behind the first that is held back only requests that nobody will pull are taken.
        """
        pool = self.kv_cache_manager.block_pool
        budget = int(self.tetri_settings.transfer.pinned_budget * (pool.num_gpu_blocks - 1))
        num_blocks_ahead = self._num_pinned_blocks() + sum(
            num_blocks(request.num_prompt_tokens, self.block_size)
            for request in (*self.running, *self.kv_holding_waiting, *returning)
            if _is_held_for_peer(request)
        )
        within: list[Request] = []
        self._is_held_back = False
        for request in ordered:
            own = num_blocks(request.num_tokens, self.block_size) if _is_held_for_peer(request) else 0
            self._is_held_back |= bool(own and num_blocks_ahead and num_blocks_ahead + own > budget)
            if not (own and self._is_held_back):
                num_blocks_ahead += own
                within.append(request)
        return within

    def _num_pinned_blocks(self) -> int:
        if len(self.requests) == len(self.running) + len(self.waiting) + len(self.kv_holding_waiting):
            return 0  # nothing is finished and still held
        return sum(
            num_blocks(request.num_computed_tokens, self.block_size)
            for request in self.requests.values()
            if RequestStatus.is_finished(request.status)
        )

    def _ordered(self, fresh: list[Request]) -> list[Request]:
        """What is left of the current round, then further rounds as far as a step can reach."""
        waiting = {request.request_id: request for request in fresh}
        room = self.tetri_settings.chunk.chunk_tokens or self._max_step_tokens
        ids = left_of_current_round(self._rounds, waiting)
        ordered: list[Request] = []
        self._rounds = []
        while waiting and room > 0:
            ids = ids or self._next_round(waiting.values())
            self._rounds.append(ids)
            for id in ids:
                request = waiting.pop(id)
                ordered.append(request)
                if request.status == RequestStatus.WAITING:  # the others (a grammar, say) are skipped by vLLM
                    room -= request.num_tokens - request.num_computed_tokens
            ids = []
        return ordered

    def _next_round(self, waiting: Iterable[Request]) -> list[str]:
        sched_batch = self.tetri_settings.order.sched_batch
        oldest = sorted(waiting, key=lambda request: request.arrival_time)[:sched_batch]  # nobody else can be in it
        queue = [
            QueuedPrompt(request.request_id, request.arrival_time, request.num_tokens - request.num_computed_tokens)
            for request in oldest
        ]
        ids = list(dict.fromkeys(next_round(queue, (), self._order, sched_batch)))
        known = {prompt.id for prompt in queue}
        # A policy of the user's that lost all requests, or made some up: they are served in arrival order.
        return ids if ids and known.issuperset(ids) else [prompt.id for prompt in queue]

    def _admissible(self, fresh: list[Request], returning: list[Request], num_seats: int) -> list[Request]:
        """Requests that the admission policy takes now (`core.admit.admit_queue`).

        Preempted requests (`returning`) were admitted once: they are not judged again, but their room is set aside.
        """
        now_s = unix_now_s()
        admit = self.tetri_settings.admit
        pool = self._pool(returning)
        known = [self.tetri_tracker.get(request.request_id) for request in fresh]
        # Unknown to us (a streaming session's continuation): vLLM's own rule.
        unknown = [request for request, tracked in zip(fresh, known, strict=True) if tracked is None]
        queue = [(request, tracked) for request, tracked in zip(fresh, known, strict=True) if tracked is not None]
        queue.sort(key=lambda pair: pair[1].queued_since_s)  # one that another instance gave back keeps its place
        candidates = [
            Candidate(
                Newcomer(
                    request.num_prompt_tokens,
                    tracked.length_range,
                    self._num_cached_blocks(request) if position < MAX_CACHE_LOOKUPS else 0,
                    tracked.forecast,
                ),
                tracked.expected_tokens,
                tracked.num_overtaken,
                0.0 if tracked.vetoed_since_s is None else now_s - tracked.vetoed_since_s,
            )
            for position, (request, tracked) in enumerate(queue)
        ]
        rules = QueueRules(num_seats, admit.order, admit.max_veto_s, admit.max_overtaken, admit.may_overtake)
        admitted, _ = admit_queue(candidates, pool, self._admit, rules)
        refused = frozenset(range(len(queue))).difference(admitted)
        if refused and len(admitted) < num_seats:
            first = queue[min(refused)][1]
            first.vetoed_since_s = first.vetoed_since_s or now_s
        return unknown + [queue[index][0] for index in admitted]

    def _note_overtaken(self, offered: Sequence[Request]) -> None:
        """Whoever still waits and came before one that vLLM has taken was overtaken by it; a preempted one's return is
        no second time.
        """
        taken = [self.tetri_tracker.get(request.request_id) for request in offered if request.status not in _WAITING]
        came_s = [tracked.queued_since_s for tracked in taken if tracked is not None and tracked.admitted_s is None]
        if not came_s or not self.waiting:
            return
        for request in self.waiting:
            tracked = self.tetri_tracker.get(request.request_id)
            if tracked is not None and request.status in _UNTOUCHED:
                tracked.num_overtaken += sum(tracked.queued_since_s < other_s for other_s in came_s)

    def _num_cached_blocks(self, request: Request) -> int:
        """Blocks of its prompt that a live request already holds; blocks only cached count as free in vLLM's pool."""
        if not self.cache_config.enable_prefix_caching:
            return 0
        cached, *_ = self._get_local_prefix_cache_hit(request)
        return sum(block.ref_cnt > 0 for block in cached.blocks[0])

    def _pool(self, returning: Sequence[Request]) -> DecodePool:
        """What is free and who is active; a preempted request counts as if it held again what it will take first."""
        block_pool = self.kv_cache_manager.block_pool
        num_held_blocks = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        active = [
            self._active_decode(request, len(num_held_blocks.get(request.request_id, ())))
            for request in self._active_requests()
            if self.tetri_tracker.get(request.request_id) is not None
        ]
        back = [self._active_decode(request, num_blocks(request.num_tokens, self.block_size)) for request in returning]
        return DecodePool(
            block_size_tokens=self.block_size,
            num_total_blocks=block_pool.num_gpu_blocks - 1,  # one is vLLM's null block
            num_free_blocks=block_pool.get_num_free_blocks() - sum(q.num_held_blocks for q in back),
            active=(*active, *back),
            overflow_probability=self.tetri_settings.admit.overflow_probability,
        )

    def _active_decode(self, request: Request, num_held_blocks: int) -> ActiveDecode:
        # Tokens of steps under way (async scheduling) count as put out.
        out = request.num_output_tokens + request.num_output_placeholders
        if self.tetri_tracker.get(request.request_id) is None:
            length_range, forecast = LengthRange(0, max(request.max_tokens, out) + 1), None
        else:
            tracked = self.tetri_tracker.refresh(request.request_id, out)
            length_range, forecast = tracked.length_range, tracked.forecast
        return ActiveDecode(request.num_prompt_tokens, out, length_range, num_held_blocks, forecast)

    def _active_requests(self) -> Iterable[Request]:
        """Running, loading, and loaded and waiting to run: all that hold blocks and are not finished."""
        yield from self.running
        yield from self.kv_holding_waiting

    # Bookkeeping

    def _after_schedule(self, output: Any, offered: Sequence[Request]) -> None:
        now_s = unix_now_s()
        for request in offered:
            tracked = self.tetri_tracker.get(request.request_id)
            if tracked is None or request.status == RequestStatus.WAITING:
                continue
            if tracked.admitted_s is None:
                tracked.admitted_s = now_s
                if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                    tracked.transfer_start_s = now_s
        for new in output.scheduled_new_reqs:
            tracked = self.tetri_tracker.get(new.req_id)
            if tracked is not None and tracked.first_scheduled_s is None:  # vLLM's V2 runner lists resumed ones too
                _mark_first_scheduled(self.requests[new.req_id], tracked, now_s)
                self._tokens.begin(new.req_id, tracked)
        num_prompt_tokens = self._tokens.note_step(self.requests, output)
        self._prefill_steps.append(time.monotonic() if num_prompt_tokens else None)
        self._publish_if_due()

    def _publish_if_due(self) -> None:
        """Publish after a while, or at once when a request ended: an engine that falls idle has said its last word."""
        now_s = time.monotonic()
        if now_s - self._published_s >= PUBLISH_INTERVAL_SHARE * self.tetri_settings.report_interval_s:
            self._published_s = now_s
            self._publish()

    def _publish(self) -> None:
        """Hand an immutable snapshot to the shipping thread; O(queue), no allocation of blocks or locks."""
        num_loading = sum(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in self.kv_holding_waiting)
        num_active = len(self.running) + len(self.kv_holding_waiting)
        is_decode = self.tetri_role is Role.DECODE
        heavy = self.tetri_tracker.num_heavy_decodes
        begun = (self.requests[id] for id in self._tokens.prefilling)
        prefilling = [request for request in begun if request.status == RequestStatus.RUNNING]
        pool = self.kv_cache_manager.block_pool
        num_total, num_free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        self._publisher.publish(
            EngineSnapshot(
                num_waiting=len(self.waiting),
                num_loading=num_loading,
                num_running=num_active - num_loading,
                num_waiting_prompt_tokens=sum(
                    max(0, request.num_prompt_tokens - request.num_computed_tokens)
                    for request in (*self.waiting, *prefilling)
                ),
                num_vetoed_tokens=sum(request.num_prompt_tokens for request in self.waiting) if is_decode else 0,
                num_total_blocks=num_total,
                num_free_blocks=num_free,
                num_pinned_blocks=self._num_pinned_blocks(),
                is_over_pinned_budget=self._is_held_back and bool(self.waiting),
                block_size_tokens=self.block_size,
                num_heavy_decodes=heavy,
                num_light_decodes=max(0, num_active + len(self.waiting) - heavy),
                prefill_busy_s=self._prefill_busy_s,
                decode_busy=max(1 - num_free / num_total, num_active / self.max_num_running_reqs),
            )
        )

    def withdraw(self, own_id: str, room_tokens: int | None) -> Withdrawal:
        """Take out of the queue what has no block yet: the request that a gateway calls `own_id`.

        With `room_tokens` it is relinquished, if prompt and reply (at its longest in the range in force) fit so many:
        its KV cache stays pinned on the prefill instance, which is told nothing and sees no more heartbeats from here,
        so that another decode instance can pull it within the lease. With None the prefill instance is told to free.
        A request that runs whole may be several of vLLM's (several prompts or samples): all of them must still wait.
        """
        ids = self.tetri_tracker.engine_ids(own_id)
        requests = [self.requests[id] for id in ids if id in self.requests]
        untouched = {request.request_id for request in self.waiting if request.status in _UNTOUCHED}
        if not requests:
            return Withdrawal.UNKNOWN
        if not untouched.issuperset(ids):
            return Withdrawal.NOT_WAITING
        if room_tokens is not None:
            found = [(request, self.tetri_tracker.get(request.request_id)) for request in requests]
            if any(t and request.num_prompt_tokens + t.length_range.high_tokens > room_tokens for request, t in found):
                return Withdrawal.WAITS_ON
            for request in requests:
                if request.kv_transfer_params is not None:
                    request.kv_transfer_params["do_remote_prefill"] = False  # the NIXL connector then frees nothing
        self.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        return Withdrawal.DONE

    @property
    def tetri_totals(self) -> dict[str, int]:
        """Tokens by what they were, and preemptions, since the start."""
        return dict(self._tokens.totals)

    def tetri_inspect(self, what: str) -> dict[str, Any]:
        """State for the agent, between steps: "ledger", or "requests" with totals."""
        if what == "ledger":
            return take_ledger(self)
        return {
            "role": self.tetri_role.value,
            "totals": self.tetri_totals,
            "requests": self.tetri_tracker.records(),
        }


class TetriScheduler(TetriSchedulerMixin, Scheduler):
    """Over vLLM's plain scheduler."""


class TetriAsyncScheduler(TetriSchedulerMixin, AsyncScheduler):
    """Over vLLM's async scheduler."""


def make_scheduler(**kwargs: Any) -> TetriSchedulerMixin:
    """`--scheduler-cls serving_plugin.engine.scheduler.make_scheduler`: the mixin over the class vLLM would take."""
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (TetriAsyncScheduler if is_async else TetriScheduler)(**kwargs)


def _is_held_for_peer(request: Request) -> bool:
    """Whether its KV cache stays pinned here when it ends, to be pulled; not so if it runs whole."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def _ends_with_step_under_way(request: Request) -> bool:
    """vLLM's own test (async scheduling): the step in flight gives the last of `max_tokens`, so it is skipped now."""
    num_pending = request.num_output_placeholders
    num_certain = request.num_computed_tokens + 2 - num_pending
    return num_pending > 0 and num_certain >= request.num_prompt_tokens + request.max_tokens


def _queue_of(policy: SchedulingPolicy, requests: Iterable[Request]) -> Any:
    queue = create_request_queue(policy)
    for request in requests:
        queue.add_request(request)
    return queue


def _restore(full: Any, waiting: list[Request], offered: list[Request], left: list[Request]) -> None:
    """Make `full` the queue after a step: newly preempted requests in front, then what is left, in its old order."""
    left_ids, offered_ids = {id(request) for request in left}, {id(request) for request in offered}
    known_ids = {id(request) for request in waiting}
    preempted = [request for request in left if id(request) not in known_ids]
    if not preempted and len(left) == len(offered):
        return  # nothing was taken
    kept = [request for request in waiting if id(request) in left_ids or id(request) not in offered_ids]
    full.clear()
    full.extend(preempted + kept)


def _metadata(request: Request) -> dict[str, Any] | None:
    """Our part of the request's transfer parameters."""
    meta = (request.kv_transfer_params or {}).get("tetri")
    return meta if isinstance(meta, dict) else None


def _mark_first_scheduled(request: Request, tracked: Tracked, now_s: float) -> None:
    tracked.first_scheduled_s = now_s
    meta = _metadata(request)
    if meta is not None:  # mutable and per request: it travels to `request_finished` and so into the response
        meta["prefill_start_s"] = now_s
