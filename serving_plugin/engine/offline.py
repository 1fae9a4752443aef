"""One vLLM engine core in this process, driven step by step: what `tetri profile` and the experiments measure.

The real engine, model and scheduler; no HTTP, no tokeniser and no second process on the core, so that the time of a
step is the engine's own. `offline_process` runs one on a core of its own. vLLM 0.32.0 internals: `v1/engine/core.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from serving_plugin.core.config import InstanceSettings
from serving_plugin.engine.offline_process import EngineSpec, Progress, Step
from serving_plugin.wire import KV_CONNECTOR, SCHEDULER_FACTORY


@dataclass(slots=True)
class _Scheduled:
    num_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_decode_tokens: int = 0


class OfflineEngine:
    """`add` requests, `step` until they are done, read `steps` and `requests`."""

    def __init__(self, spec: EngineSpec) -> None:
        """Load the model. The environment of `offline_process.environment_of` must be set before vLLM is imported."""
        args: dict[str, Any] = {}
        if spec.num_blocks is not None:
            args["num_gpu_blocks_override"] = spec.num_blocks + 1  # one is vLLM's null block
        if spec.settings is not None:
            args["scheduler_cls"] = SCHEDULER_FACTORY
            args["kv_transfer_config"] = {
                **KV_CONNECTOR,
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {**spec.settings.to_dict(), "kv_lease_duration": spec.kv_lease_s},
            }
        config = EngineArgs(
            model=spec.model,
            dtype=spec.dtype,
            enforce_eager=spec.enforce_eager,
            block_size=spec.block_size_tokens,
            enable_prefix_caching=spec.enable_prefix_caching,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_model_len=spec.max_model_len_tokens,
            disable_log_stats=True,
            **args,
        ).create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.scheduler: Any = self.core.scheduler
        self.vocabulary_size: int = config.model_config.get_vocab_size()
        self.steps: list[Step] = []
        self.requests: dict[str, Progress] = {}
        self._scheduler_s = 0.0
        self._scheduled = _Scheduled()
        self._counting_s = 0.0  # our own counting, inside a step but no part of it
        self._time_the_scheduler()

    def _time_the_scheduler(self) -> None:
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            output = schedule(*args, **kwargs)
            self._scheduler_s += time.perf_counter() - start_s
            counting_s = time.perf_counter()
            self._scheduled = self._counted(output, start_s)
            self._counting_s = time.perf_counter() - counting_s
            return output

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = update(*args, **kwargs)
            self._scheduler_s += time.perf_counter() - start_s
            return result

        self.scheduler.schedule, self.scheduler.update_from_output = timed_schedule, timed_update

    def add(
        self,
        id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        num_output_tokens: int | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Progress:
        """Queue a request, greedy sampling, no end-of-sequence token.

        `num_output_tokens`: where it ends by itself. The scheduler's policies see `max_tokens` alone, as they would of
        a client's request: vLLM's stop check is told only after they have looked.
        `kv_transfer_params`: as a gateway would send them; our metadata is under "tetri".
        """
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            extra_args=None if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params},
        )
        request = EngineCoreRequest(
            request_id=id,
            prompt_token_ids=list(prompt_token_ids),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        internal, wave = self.core.preprocess_add_request(request)
        progress = Progress(id, len(prompt_token_ids), time.perf_counter(), [])
        self.requests[id] = progress
        start_s = time.perf_counter()
        self.core.add_request(internal, wave)
        self._scheduler_s += time.perf_counter() - start_s
        if num_output_tokens is not None:
            internal.max_tokens = min(num_output_tokens, max_tokens)
        return progress

    def step(self) -> bool:
        """One engine step, recorded unless it computed nothing; False if nothing was there to compute."""
        start_s = time.perf_counter()
        outputs, is_computed = self.core.step()
        self.core.post_step(is_computed)
        end_s = time.perf_counter()
        for progress_outputs in outputs.values():
            for output in progress_outputs.outputs:
                self._note(output, end_s)
        if is_computed:
            self._record(start_s, end_s)
            self._scheduler_s = 0.0
        elif self.scheduler.has_requests():
            time.sleep(0.001)  # as vLLM's own loop does while KV is under way
        return is_computed

    def _note(self, output: Any, end_s: float) -> None:
        progress = self.requests[output.request_id]
        progress.token_times_s.extend([end_s] * len(output.new_token_ids))
        if output.finished:
            progress.finished_s = end_s
            progress.kv_transfer_params = output.kv_transfer_params

    def _counted(self, output: Any, start_s: float) -> _Scheduled:
        """What was scheduled; `num_computed_tokens` already counts it, outputs do not yet."""
        counts = _Scheduled()
        for id in output.preempted_req_ids or ():
            self.requests[id].num_preemptions += 1
        for id, num_tokens in output.num_scheduled_tokens.items():
            request, progress = self.scheduler.requests[id], self.requests[id]
            if progress.first_scheduled_s is None:
                progress.first_scheduled_s = start_s
            num_left = request.num_tokens - (request.num_computed_tokens - num_tokens)
            if num_left == 1 and request.num_output_tokens:
                counts.num_decode_tokens += num_tokens
            elif progress.num_preemptions and progress.token_times_s:
                counts.num_recomputed_tokens += num_tokens
            else:
                counts.num_prompt_tokens += num_tokens
        return counts

    def _record(self, start_s: float, end_s: float) -> None:
        self.steps.append(
            Step(
                start_s,
                end_s - start_s - self._counting_s,
                self._scheduler_s,
                self._scheduled.num_prompt_tokens,
                self._scheduled.num_recomputed_tokens,
                self._scheduled.num_decode_tokens,
                len(self.scheduler.running),
                len(self.scheduler.waiting),
                self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            )
        )

    def run(self, timeout_s: float) -> None:
        """Step until no request is unfinished.

        Raises:
            TimeoutError: that takes longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.scheduler.has_unfinished_requests():
            self.step()
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"{self.scheduler.get_num_unfinished_requests()} requests unfinished after {timeout_s:g} s"
                )

    def forget(self) -> None:
        """Drop what was recorded; the engine goes on."""
        self.steps, self.requests = [], {}

    def configure(self, settings: InstanceSettings) -> None:
        """Other policies from here on, as if the instance had been started with them; nothing may be in flight."""
        self.scheduler.configure(settings)
