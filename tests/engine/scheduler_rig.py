"""vLLM's real scheduler classes with our mixin, without an engine: a pool of a few blocks, made-up tokens, a clock that
stands still between steps. `Rig.step` is what EngineCore does in a step: `step`, or `step_with_batch_queue` (one step
stays in flight) over the async class.

Import this inside a fixture only: it brings vLLM along.
"""

from __future__ import annotations

import copy
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from serving_plugin.core.config import InstanceSettings
from serving_plugin.engine import scheduler as adapter
from serving_plugin.engine.ledger import take_ledger
from serving_plugin.engine.load_feed import EngineSnapshot
from serving_plugin.engine.settings import settings_of

BLOCK_SIZE = 16
STOP = 1  # token id; the others tell their place in the reply
PLAIN, ASYNC = "plain", "async"
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 1024,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 32,
    "do_layer_norm_before": True,
    "dtype": "float32",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def make_vllm_config(folder: Path, max_model_len: int = 1024) -> VllmConfig:
    """The configuration of a tiny OPT, of which there is no more than `config.json`. As `engine/offline.py` has it."""
    (folder / "config.json").write_text(json.dumps(OPT))
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        max_model_len=max_model_len,
        disable_log_stats=True,
        scheduler_cls="serving_plugin.engine.scheduler.make_scheduler",
        kv_transfer_config={
            "kv_connector": "TetriConnector",
            "kv_connector_module_path": "serving_plugin.engine.connector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"role": "decode", "instance_id": "rig", "url": "http://rig"},
        },
    ).create_engine_config()


def configured(base: VllmConfig, settings: dict[str, Any], kind: str, **changes: Any) -> VllmConfig:
    """`base` for another instance: `settings` beside what every rig has, `changes` to vLLM's scheduler settings."""
    config = copy.copy(base)
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.scheduler_config.async_scheduling = kind == ASYNC
    for key, value in changes.items():
        setattr(config.scheduler_config, key, value)
    config.cache_config = copy.copy(base.cache_config)
    config.kv_transfer_config = copy.copy(base.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = {
        **base.kv_transfer_config.kv_connector_extra_config,
        **settings,
    }
    return config


def scheduler_arguments(config: VllmConfig, num_blocks: int, prefix_caching: bool = False) -> dict[str, Any]:
    """What EngineCore makes a scheduler with; the pool is `num_blocks` large without vLLM's null block."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=16, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = num_blocks + 1
    config.cache_config.enable_prefix_caching = prefix_caching
    return {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(
            num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK_SIZE,
    }


@dataclass
class Planned:
    """A request of the rig: where its reply really ends, and the tokens that came."""

    num_prompt_tokens: int
    num_output_tokens: int
    tokens: list[int] = field(default_factory=list)
    is_answered: bool = False
    first_step: int | None = None


class Rig:
    """A scheduler and what stands for model and KV transfer around it. Every step checks queues and block ledger."""

    def __init__(self, base: VllmConfig, kind: str, num_blocks: int, settings: dict[str, Any], **changes: Any) -> None:
        prefix_caching, is_v2 = changes.pop("prefix_caching", False), changes.pop("v2_runner", False)
        recompute = changes.pop("recompute_failed_loads", False)
        settings = {"report_interval_s": 100.0, **settings}  # nobody listens to loads
        self.config = configured(base, settings, kind, **changes)
        scheduler_class = adapter.TetriAsyncScheduler if kind == ASYNC else adapter.TetriScheduler
        self.scheduler: Any = scheduler_class(**scheduler_arguments(self.config, num_blocks, prefix_caching))
        self.scheduler.use_v2_model_runner = is_v2
        self.scheduler.recompute_kv_load_failures = recompute
        self.kind = kind
        self.num_steps = 0
        self.now_s = 1000.0
        self.planned: dict[str, Planned] = {}
        self.outputs: list[SchedulerOutput] = []  # of every step so far
        self.prompt_tokens: list[int] = []  # first-time prompt tokens and recomputed ones, of every step so far
        self.preempted: list[str] = []
        self.resumed: list[str] = []
        self.load_steps = 1  # a load ends so many steps after it was begun; None: when the test says so
        self.received: set[str] = set()
        self.sent: set[str] = set()
        self.failed: set[str] = set()
        self._loading: dict[str, int] = {}
        self._arrived: set[str] = set()
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    @property
    def settings(self) -> InstanceSettings:
        return settings_of(self.config)

    def add(
        self,
        id: str,
        num_prompt_tokens: int,
        num_output_tokens: int = 1,
        max_tokens: int | None = None,
        length_range: tuple[int, int] | None = None,
        forecast: tuple[list[int], list[float]] | None = None,
        is_remote: bool = False,
        is_held: bool = False,
        queued_since_s: float | None = None,
        params: dict[str, Any] | None = None,
        own_id: str | None = None,
        token: int = 7,
        **sampling: Any,
    ) -> Request:
        """Queue a request; policies see `max_tokens`, its reply ends after `num_output_tokens`.

        `is_remote`: its KV cache is pulled from a prefill instance; `is_held`: it is kept for a decode instance;
        `queued_since_s`: another decode instance had it then, and gave it back. `params` comes on top of all that.
        `own_id`: what a gateway calls it.
        """
        meta: dict[str, Any] = {"request_id": own_id or f"own-{id}"}
        if length_range is not None and forecast is None:
            forecast = (list(length_range), [1.0])
        if forecast is not None:
            meta["forecast"] = {"edges_tokens": forecast[0], "probabilities": forecast[1]}
        if length_range is not None:
            meta["length_range"] = list(length_range)
        if queued_since_s is not None:
            meta["queued_since_s"] = queued_since_s
        transfer: dict[str, Any] = {"tetri": meta}
        if is_held:
            transfer |= {"do_remote_decode": True, "do_remote_prefill": False}
        if is_remote:
            num_remote_blocks = -(-num_prompt_tokens // BLOCK_SIZE)
            meta["decode_id"] = "rig"
            transfer |= {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "prefill",
                "remote_request_id": f"{id}-on-prefill",
                "remote_block_ids": [list(range(num_remote_blocks))],
                "remote_host": "127.0.0.1",
                "remote_port": 1,
                "tp_size": 1,
            }
        transfer |= params or {}
        request = Request(
            id,
            [token] * num_prompt_tokens,
            SamplingParams(
                max_tokens=max_tokens or num_output_tokens,
                stop_token_ids=[STOP],
                extra_args={"kv_transfer_params": transfer},
                **sampling,
            ),
            None,
            arrival_time=self.now_s,
            block_hasher=self._block_hasher(),
        )
        self.now_s += 0.001
        self.planned[id] = Planned(num_prompt_tokens, num_output_tokens)
        self.scheduler.add_request(request)
        return request

    def _block_hasher(self) -> Callable[[Request], list[Any]] | None:
        if not self.config.cache_config.enable_prefix_caching:
            return None
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        return get_request_block_hasher(BLOCK_SIZE, hash_fn)

    def step(self) -> SchedulerOutput | None:
        """One step of the engine core; what was scheduled in it, if anything was asked."""
        self.now_s += 1.0
        output = None
        if self.scheduler.has_requests():
            self.num_steps += 1
            output = self.scheduler.schedule()
            self.outputs.append(output)
            self._in_flight.appendleft((output, self._run_model(output)))
            self.check()
            goes_on = bool(output.total_num_scheduled_tokens) or self.scheduler.has_requests()
            if self.kind == ASYNC and len(self._in_flight) < 2 and goes_on:
                return output
        if self._in_flight:
            self._update(*self._in_flight.pop())
            self.check()
        return output

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def run(self, max_steps: int = 400) -> None:
        """Step until nothing is left to do; whoever waits for ever fails here."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            self.step()
        left = {id: request.status.name for id, request in self.scheduler.requests.items()}
        raise AssertionError(f"still there after {max_steps} steps: {left}")

    def run_until(self, condition: Callable[[], bool], max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"did not come true within {max_steps} steps")

    def _run_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Decided when the step is scheduled, as on a GPU: one token for each request whose prompt is complete."""
        ids, sampled, num_prompt_tokens = list(output.num_scheduled_tokens), [], 0
        self.preempted += output.preempted_req_ids or ()
        for id, num_tokens in output.num_scheduled_tokens.items():
            request, plan = self.scheduler.requests[id], self.planned[id]
            if plan.first_step is None:
                plan.first_step = self.num_steps
            if id in output.scheduled_cached_reqs.resumed_req_ids:
                self.resumed.append(id)
            num_pending = request.num_output_placeholders if self.kind == ASYNC else 0
            place = request.num_output_tokens + (num_pending or 1)
            is_decode = num_tokens == 1 and not request.is_prefill_chunk and place > 1
            num_prompt_tokens += 0 if is_decode else num_tokens
            if request.is_prefill_chunk:
                sampled.append([])
            else:
                sampled.append([STOP if place == plan.num_output_tokens else 1 + place])
        self.prompt_tokens.append(num_prompt_tokens)
        for request in self.scheduler.kv_holding_waiting:
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and request.request_id not in self._arrived:
                self._loading.setdefault(request.request_id, self.num_steps)
        for id in list(self._loading):
            if self.load_steps is not None and self.num_steps - self._loading[id] >= self.load_steps:
                self.received.add(id)
        transfer = KVConnectorOutput(
            finished_recving=self.received | self.failed, finished_sending=self.sent, failed_recving=self.failed
        )
        self._arrived |= self.received | self.failed
        for id in self._arrived:
            self._loading.pop(id, None)
        self.received, self.sent, self.failed = set(), set(), set()
        return ModelRunnerOutput(ids, {id: i for i, id in enumerate(ids)}, sampled, kv_connector_output=transfer)

    def _update(self, scheduled: SchedulerOutput, made: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, made).values():
            for output in outputs.outputs:
                plan = self.planned[output.request_id]
                plan.tokens += output.new_token_ids
                plan.is_answered |= output.finish_reason is not None

    # What must hold between any two calls

    def check(self) -> None:
        scheduler = self.scheduler
        queues = (scheduler.waiting, scheduler.kv_holding_waiting, scheduler.running)
        ids = [request.request_id for queue in queues for request in queue]
        alive = [id for id, request in scheduler.requests.items() if not RequestStatus.is_finished(request.status)]
        assert sorted(ids) == sorted(alive), "every request stands in exactly one queue"
        assert scheduler.get_request_counts() == (len(queues[2]), len(queues[0]) + len(queues[1]))
        waiting = list(scheduler.waiting)
        fresh = [request for request in waiting if request.status != RequestStatus.PREEMPTED]
        assert waiting[len(waiting) - len(fresh) :] == fresh, "preempted requests stand at the head"
        assert fresh == sorted(fresh, key=lambda request: request.arrival_time), "the others in order of arrival"
        if not scheduler.deferred_frees:
            ledger = take_ledger(scheduler)
            assert ledger["balanced"], ledger["problems"]

    def check_done(self) -> None:
        """Everybody got exactly the tokens planned, in their order; all blocks are free again."""
        for id, plan in self.planned.items():
            expected = [1 + place for place in range(1, plan.num_output_tokens)] + [STOP]
            assert plan.tokens == expected, id
        assert not self.scheduler.requests
        assert self.num_free_blocks == self.num_total_blocks

    # What is where

    @property
    def num_total_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def held(self, id: str) -> int:
        return len(self.scheduler.kv_cache_manager.get_block_ids(id)[0])

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    @property
    def loading(self) -> list[str]:
        return [request.request_id for request in self.scheduler.kv_holding_waiting]

    def served(self, ids: Iterable[str] | None = None) -> list[str]:
        """Ids in the order in which they were first scheduled; those of one step as vLLM lists them."""
        order = [id for output in self.outputs for id in output.num_scheduled_tokens]
        wanted = set(self.planned if ids is None else ids)
        return [id for id in dict.fromkeys(order) if id in wanted]

    def all_answered(self) -> bool:
        return all(plan.is_answered for plan in self.planned.values())

    @property
    def last_snapshot(self) -> EngineSnapshot:
        """What the load feed ships next."""
        return self.scheduler._publisher._latest

    def scheduled_tokens(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for output in self.outputs:
            total.update(output.num_scheduled_tokens)
        return total

    def abort(self, *ids: str) -> None:
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self.check()

    def close(self) -> None:
        self.scheduler.shutdown()
