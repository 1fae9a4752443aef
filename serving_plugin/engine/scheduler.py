"""TetriServe's policies inside vLLM's scheduler: a mixin over both scheduler classes (plain on CPU, async on GPU).

One idea: before each step, `self.waiting` is swapped for the requests that the policies admit, in the policies' order;
vLLM schedules that queue as it always does; afterwards the full queue is restored in arrival order. vLLM never asks per
request, blocks stay unallocated until admission, and aborts and counts outside the step see the whole queue.
Source: TetriInfer 3.3.1 (order, chunk) and 3.4 (admission). vLLM 0.32.0 internals: `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from serving_plugin.core.admit import ActiveDecode, DecodePool, Newcomer, fits_now
from serving_plugin.core.chunk import step_token_budget
from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.order import QueuedPrompt, next_round
from serving_plugin.core.registry import resolve_policy
from serving_plugin.core.types import Role, num_blocks
from serving_plugin.engine.ledger import take_ledger
from serving_plugin.engine.load_feed import EngineSnapshot, LoadPublisher, TransferEvent, unix_now_s
from serving_plugin.engine.settings import settings_of
from serving_plugin.engine.tracker import RequestTracker, Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _SchedulerBase
else:
    _SchedulerBase = object  # a mixin over both of vLLM's classes


class TetriSchedulerMixin(_SchedulerBase):
    """Order, chunk and admission around vLLM's `schedule`; publishes loads; keeps the request tracker."""

    waiting: Any  # vLLM's RequestQueue

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.policy is not SchedulingPolicy.FCFS:
            raise ConfigurationError(
                f"--scheduling-policy {self.policy.value}: TetriServe orders the queue itself; leave it at fcfs"
            )
        settings = settings_of(self.vllm_config)
        self.configure(settings)
        self.tetri_totals = {"num_prompt_tokens_computed": 0, "num_prompt_tokens_loaded": 0, "num_output_tokens": 0}
        self._round_ids: list[str] = []
        self._num_vetoed_tokens = 0
        self._prefill_busy_s = 0.0
        self._prefill_step_started_s: float | None = None
        self._publisher = LoadPublisher(self.vllm_config.kv_transfer_config.engine_id, settings.report_interval_s)
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

    # What vLLM calls

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step: offer the admissible queue, let vLLM schedule it, restore the full queue."""
        full = list(self.waiting)
        offered = self._offered(full) if full else []
        self.max_num_scheduled_tokens = self._step_token_budget(offered)
        self.waiting = _queue_of(self.policy, offered)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.waiting = _queue_of(self.policy, _restored(full, offered, list(self.waiting)))
        self._after_schedule(output, offered)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's bookkeeping of a finished step, then loads and transfer times."""
        if self._prefill_step_started_s is not None:
            self._prefill_busy_s += time.monotonic() - self._prefill_step_started_s
            self._prefill_step_started_s = None
        result = super().update_from_output(scheduler_output, model_runner_output)
        self._publish()
        return result

    def add_request(self, request: Request) -> None:
        """Follow the request from here; its forecast comes with its `kv_transfer_params`."""
        if request.request_id not in self.requests:
            meta = (request.kv_transfer_params or {}).get("tetri") or {}
            self.tetri_tracker.add(
                request.request_id,
                str(meta.get("request_id", request.request_id)),
                request.num_prompt_tokens,
                max(1, request.max_tokens),
                meta,
                unix_now_s(),
            )
        super().add_request(request)
        self._publish()

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
        completed = request.status != RequestStatus.FINISHED_ABORTED and self.tetri_role is Role.DECODE
        self.tetri_tracker.finish(request.request_id, request.num_output_tokens, completed, unix_now_s())
        return super()._free_request(request, *args, **kwargs)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        failed = request.request_id in self.failed_recving_kv_req_ids
        super()._update_waiting_for_remote_kv(request)
        tracked = self.tetri_tracker.get(request.request_id)
        if tracked is None or tracked.transfer_start_s is None:
            return
        tracked.transfer_end_s = unix_now_s()
        tracked.num_remote_tokens = 0 if failed else request.num_prompt_tokens
        self.tetri_totals["num_prompt_tokens_loaded"] += tracked.num_remote_tokens
        self._publisher.add_event(
            TransferEvent(
                tracked.request_id, tracked.transfer_start_s, tracked.transfer_end_s, tracked.num_remote_tokens
            )
        )

    # Decisions, all of them in core

    def _step_token_budget(self, offered: list[Request]) -> int:
        """Decodes plus one chunk, as long as the chunk policy makes it of the prompts in their order."""
        chunk_tokens = self.tetri_settings.chunk.chunk_tokens
        limit = self.scheduler_config.max_num_batched_tokens
        if chunk_tokens == 0:
            return limit
        prefilling = [request for request in self.running if request.is_prefill_chunk]
        prompt_tokens_left = [
            max(0, request.num_tokens - request.num_computed_tokens)
            for request in (*prefilling, *self.kv_holding_waiting, *offered)
        ]
        num_prompt_tokens = sum(self._chunk(prompt_tokens_left, chunk_tokens))
        num_decode_tokens = (len(self.running) - len(prefilling)) * (1 + self.num_spec_tokens)
        return step_token_budget(num_decode_tokens, max(1, num_prompt_tokens), limit)

    def _offered(self, full: list[Request]) -> list[Request]:
        """The requests that vLLM may schedule now, in order: preempted ones first, then what the role's policy says."""
        returning = [request for request in full if request.status == RequestStatus.PREEMPTED]
        fresh = [request for request in full if request.status != RequestStatus.PREEMPTED]
        if self.tetri_role is Role.PREFILL:
            return returning + self._ordered(fresh)
        return returning + self._admissible(fresh, returning)

    def _ordered(self, fresh: list[Request]) -> list[Request]:
        by_id = {request.request_id: request for request in fresh}
        queue = [
            QueuedPrompt(request.request_id, request.arrival_time, request.num_tokens - request.num_computed_tokens)
            for request in fresh
        ]
        sched_batch = self.tetri_settings.order.sched_batch
        ordered: list[str] = []
        current = self._round_ids
        room = self.scheduler_config.max_num_batched_tokens
        # A chunk may hold prompts of several rounds, so later ones follow the current, as far as a step can reach.
        while queue and room > 0:
            ids = next_round(queue, current, self._order, sched_batch)
            if not ids:  # a policy of the user's that lost requests: they are served in arrival order
                ids = [prompt.id for prompt in queue]
            if not ordered:
                self._round_ids = ids
            room -= sum(by_id[request_id].num_tokens for request_id in ids)
            ordered += ids
            taken = set(ids)
            queue = [prompt for prompt in queue if prompt.id not in taken]
            current = []
        return [by_id[request_id] for request_id in ordered]

    def _admissible(self, fresh: list[Request], returning: list[Request]) -> list[Request]:
        """Requests that the admission policy takes now, each judged after those before it.

        Preempted requests (`returning`) were admitted once: they are not judged again, but their room is set aside.

        A vetoed request may be overtaken, but not once its veto is older than `max_veto_s`: then it is admitted as soon
        as its prompt fits, and nobody passes it until then.
        """
        now_s = unix_now_s()
        pool = self._pool()
        for request in returning:
            pool = _with_newcomer(pool, self._newcomer_again(request))
        admitted: list[Request] = []
        self._num_vetoed_tokens = 0
        blocked_by_aged = False
        for request in fresh:
            tracked = self.tetri_tracker.get(request.request_id)
            if tracked is None:  # unknown to us (a streaming session's continuation): vLLM's own rule
                admitted.append(request)
                continue
            newcomer = Newcomer(request.num_prompt_tokens, tracked.length_range, self._num_cached_blocks(request))
            is_aged = tracked.vetoed_since_s is not None and (
                now_s - tracked.vetoed_since_s > self.tetri_settings.admit.max_veto_s
            )
            # On an empty instance vLLM's own rule decides, so that a prompt which only just fits never waits for ever.
            admit = _anything if not pool.active else fits_now if is_aged else self._admit
            if not blocked_by_aged and admit(newcomer, pool):
                admitted.append(request)
                pool = _with_newcomer(pool, newcomer)
                continue
            blocked_by_aged |= is_aged
            tracked.vetoed_since_s = tracked.vetoed_since_s or now_s
            self._num_vetoed_tokens += request.num_prompt_tokens
        return admitted

    def _newcomer_again(self, request: Request) -> Newcomer:
        """A preempted request: what it has put out counts as prompt, its range from there."""
        out = request.num_output_tokens
        high_tokens = request.max_tokens + 1
        low_tokens = 0
        if self.tetri_tracker.get(request.request_id) is not None:
            length_range = self.tetri_tracker.refresh(request.request_id, out).length_range
            low_tokens, high_tokens = length_range.low_tokens, length_range.high_tokens
        low_tokens = max(0, low_tokens - out)
        return Newcomer(request.num_tokens, LengthRange(low_tokens, max(low_tokens + 1, high_tokens - out)))

    def _num_cached_blocks(self, request: Request) -> int:
        """Blocks of its prompt that a live request already holds; blocks only cached count as free in vLLM's pool."""
        if not self.cache_config.enable_prefix_caching:
            return 0
        cached, *_ = self._get_local_prefix_cache_hit(request)
        return sum(block.ref_cnt > 0 for block in cached.blocks[0])

    def _pool(self) -> DecodePool:
        block_pool = self.kv_cache_manager.block_pool
        return DecodePool(
            block_size_tokens=self.block_size,
            num_total_blocks=block_pool.num_gpu_blocks - 1,  # one is vLLM's null block
            num_free_blocks=block_pool.get_num_free_blocks(),
            active=tuple(self._active_decodes()),
        )

    def _active_decodes(self) -> Iterable[ActiveDecode]:
        for request in self._active_requests():
            tracked = self.tetri_tracker.get(request.request_id)
            if tracked is None:
                continue
            tracked = self.tetri_tracker.refresh(request.request_id, request.num_output_tokens)
            yield ActiveDecode(
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                length_range=tracked.length_range,
                num_held_blocks=len(self.kv_cache_manager.get_block_ids(request.request_id)[0]),
            )

    def _active_requests(self) -> Iterable[Request]:
        """Running, loading, and loaded and waiting to run: all that hold blocks and are not finished."""
        yield from self.running
        yield from self.kv_holding_waiting

    # Bookkeeping

    def _after_schedule(self, output: Any, offered: list[Request]) -> None:
        now_s = unix_now_s()
        num_prompt_tokens = 0
        for request in self.running:
            num_scheduled = output.num_scheduled_tokens.get(request.request_id, 0)
            tracked = self.tetri_tracker.get(request.request_id)
            if not num_scheduled or tracked is None:
                continue
            if tracked.first_scheduled_s is None:
                _mark_first_scheduled(request, tracked, now_s)
            # `num_computed_tokens` already counts this step.
            prompt_tokens = min(
                num_scheduled, max(0, request.num_prompt_tokens - (request.num_computed_tokens - num_scheduled))
            )
            tracked.num_local_prompt_tokens += prompt_tokens
            num_prompt_tokens += prompt_tokens
            self.tetri_totals["num_output_tokens"] += num_scheduled - prompt_tokens
        self.tetri_totals["num_prompt_tokens_computed"] += num_prompt_tokens
        for request in offered:
            tracked = self.tetri_tracker.get(request.request_id)
            if tracked is not None and tracked.admitted_s is None and request.status != RequestStatus.WAITING:
                tracked.admitted_s = now_s
                if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                    tracked.transfer_start_s = now_s
        if num_prompt_tokens:
            self._prefill_step_started_s = time.monotonic()
        self._publish()

    def _publish(self) -> None:
        """Hand an immutable snapshot to the shipping thread; O(requests), no allocation of blocks or locks."""
        num_loading = sum(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in self.kv_holding_waiting)
        num_active = len(self.running) + len(self.kv_holding_waiting)
        heavy = sum(
            tracked.is_heavy_decode
            for request in (*self.running, *self.kv_holding_waiting, *self.waiting)
            if (tracked := self.tetri_tracker.get(request.request_id)) is not None
        )
        pool = self.kv_cache_manager.block_pool
        num_total, num_free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        pinned = (request for request in self.requests.values() if RequestStatus.is_finished(request.status))
        self._publisher.publish(
            EngineSnapshot(
                num_waiting=len(self.waiting),
                num_loading=num_loading,
                num_running=num_active - num_loading,
                num_waiting_prompt_tokens=sum(
                    max(0, request.num_prompt_tokens - request.num_computed_tokens)
                    for request in (*self.waiting, *self.running)
                ),
                num_vetoed_tokens=self._num_vetoed_tokens if self.waiting else 0,
                num_total_blocks=num_total,
                num_free_blocks=num_free,
                num_pinned_blocks=sum(num_blocks(request.num_computed_tokens, self.block_size) for request in pinned),
                block_size_tokens=self.block_size,
                num_heavy_decodes=heavy,
                num_light_decodes=num_active + len(self.waiting) - heavy,
                prefill_busy_s=self._prefill_busy_s,
                decode_busy=max(1 - num_free / num_total, num_active / self.max_num_running_reqs),
            )
        )

    def tetri_inspect(self, what: str) -> dict[str, Any]:
        """State for the agent, between steps: "ledger", or "requests" with totals."""
        if what == "ledger":
            return take_ledger(self)
        return {
            "role": self.tetri_role.value,
            "totals": dict(self.tetri_totals),
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


def _anything(newcomer: Newcomer, pool: DecodePool) -> bool:
    return True


def _queue_of(policy: SchedulingPolicy, requests: Iterable[Request]) -> Any:
    queue = create_request_queue(policy)
    for request in requests:
        queue.add_request(request)
    return queue


def _restored(full: list[Request], offered: list[Request], left: list[Request]) -> list[Request]:
    """The full queue after a step: newly preempted requests in front, then what is left, in its old order."""
    offered_ids = {id(request) for request in offered}
    left_ids = {id(request) for request in left}
    known_ids = {id(request) for request in full}
    preempted = [request for request in left if id(request) not in known_ids]
    kept = [request for request in full if id(request) in left_ids or id(request) not in offered_ids]
    return preempted + kept


def _with_newcomer(pool: DecodePool, newcomer: Newcomer) -> DecodePool:
    """The pool once `newcomer` holds the blocks of its prompt."""
    held = num_blocks(newcomer.num_prompt_tokens, pool.block_size_tokens)
    return DecodePool(
        block_size_tokens=pool.block_size_tokens,
        num_total_blocks=pool.num_total_blocks,
        num_free_blocks=pool.num_free_blocks - held + newcomer.num_cached_blocks,
        active=(*pool.active, ActiveDecode(newcomer.num_prompt_tokens, 0, newcomer.length_range, held)),
    )


def _mark_first_scheduled(request: Request, tracked: Tracked, now_s: float) -> None:
    tracked.first_scheduled_s = now_s
    meta = (request.kv_transfer_params or {}).get("tetri")
    if meta is not None:  # mutable and per request: it travels to `request_finished` and so into the response
        meta["prefill_start_s"] = now_s
