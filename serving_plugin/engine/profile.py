"""What `tetri profile` measures: prefill time by tokens, decode time by batch and context, and what follows from them.

The functions that take an engine run inside an `EngineProcess` under vLLM's own scheduler; this module imports no vLLM.
Definitions: docs/definitions.md, "Order and chunks on a prefill instance". Source: TetriInfer figure 2.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.engine.offline_process import START_TIMEOUT_S, EngineProcess, EngineSpec

DECODE_CONTEXTS_TOKENS = (32, 128, 512, 1024)
SHORT_TOKENS = (16, 64, 256, 1024)
MIN_MAX_TOKENS = 64  # three sizes, as many as the cost model has coefficients
MIN_MAX_BATCH = 2
PLATEAU_SHARE = 0.95
# A decode batch's contexts grow by a token a step while it is filled and measured; they may grow by this much.
GROWTH_TOKENS = 160
MAX_BATCH = 1024
FILL_TOKENS = 4096  # prompt tokens in a step while a decode batch is filled
CUDA_START_TIMEOUT_S = 1800.0  # a large model is loaded, compiled and captured
TIMEOUT_S = 600.0  # of one step's or one batch's measurement

Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What is measured. A round is every prefill size `passes` times and every decode context once, shuffled.

    `decode_batches` by context: tokens per request -> requests in a step, so that no batch's KV cache is out of hand.
    """

    prefill_tokens: tuple[int, ...]
    decode_batches: Mapping[int, tuple[int, ...]]
    num_rounds: int = 3
    passes: int = 2
    num_decode_steps: int = 4
    block_size_tokens: int = 32

    @property
    def max_model_len_tokens(self) -> int:
        """The shortest context that holds every prompt and the tokens put out."""
        return max(max(self.prefill_tokens) + 1, max(self.decode_batches) + GROWTH_TOKENS)

    @property
    def max_batch(self) -> int:
        """Requests in the largest decode batch."""
        return max(max(batches) for batches in self.decode_batches.values())

    @property
    def num_blocks(self) -> int:
        """KV blocks that the largest decode batch and the longest prompt take."""
        needed = [max(b) * _blocks(c + GROWTH_TOKENS, self.block_size_tokens) for c, b in self.decode_batches.items()]
        return max(*needed, _blocks(self.max_model_len_tokens, self.block_size_tokens))


def plan_profile(
    max_tokens: int,
    max_batch: int,
    max_model_len_tokens: int,
    *,
    max_sum_context_tokens: int = 16_384,
    num_rounds: int = 3,
    is_short: bool = False,
) -> ProfilePlan:
    """Sizes up to `max_tokens`, batches up to `max_batch`, all within the model's context.

    Args:
        max_sum_context_tokens: a batch's contexts together; more of them cost their prefill in every round.
        is_short: one round of few points, which shows that it works.

    Raises:
        ConfigurationError: the limits leave too little to fit a cost model to.
    """
    if max_tokens < MIN_MAX_TOKENS:
        raise ConfigurationError(f"--max-tokens {max_tokens}: must be {MIN_MAX_TOKENS} or more, or no curve is seen")
    if not MIN_MAX_BATCH <= max_batch <= MAX_BATCH:
        raise ConfigurationError(f"--max-batch {max_batch}: must be {MIN_MAX_BATCH} to {MAX_BATCH}")
    sizes = [n for n in _ladder() if n <= min(max_tokens, max_model_len_tokens - 1)]
    contexts = [n for n in DECODE_CONTEXTS_TOKENS if n + GROWTH_TOKENS <= max_model_len_tokens]
    if len(sizes) < 3 or len(contexts) < 2:
        shortest = max(MIN_MAX_TOKENS + 1, DECODE_CONTEXTS_TOKENS[1] + GROWTH_TOKENS)
        raise ConfigurationError(
            f"the model's context of {max_model_len_tokens} tokens is too short to profile: {shortest} are needed"
        )
    batches = [1 << i for i in range(max_batch.bit_length())]
    if is_short:
        few = (sizes[0], sizes[len(sizes) // 2], sizes[-1]) if sizes[-1] < SHORT_TOKENS[-1] else SHORT_TOKENS
        small = {context: (batches[0], batches[min(2, len(batches) - 1)]) for context in contexts[:2]}
        return ProfilePlan(few, small, num_rounds=1, passes=1, num_decode_steps=2)
    by_context = {c: tuple(b for b in batches if b * c <= max_sum_context_tokens) for c in contexts}
    return ProfilePlan(tuple(sizes), {c: b for c, b in by_context.items() if b}, num_rounds)


def _ladder() -> list[int]:
    """16, 32, 64, 96, 128, 192, ...: powers of two and what lies half way."""
    return [16, 32, *(size for power in range(6, 16) for size in (1 << power, 3 << (power - 1)))]


def _blocks(num_tokens: int, block_size_tokens: int) -> int:
    return -(-num_tokens // block_size_tokens)


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One step that prefilled one whole prompt."""

    round: int
    num_tokens: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One step of a batch that only decodes. `context_tokens`: of each prompt; `sum_context_tokens`: what the step
    really read, grown by the tokens put out so far."""

    round: int
    batch_size: int
    context_tokens: int
    sum_context_tokens: int
    step_ms: float


@dataclass(slots=True)
class Samples:
    """Everything measured on one engine; `engine` says on which (see `describe`)."""

    engine: dict[str, Any]
    prefill: list[PrefillSample] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)

    def of_round(self, number: int) -> Samples:
        """What one round brought."""
        return Samples(
            self.engine,
            [one for one in self.prefill if one.round == number],
            [one for one in self.decode if one.round == number],
        )


def measure(model: str, plan: ProfilePlan, core: int | None, dtype: str, is_cuda: bool, watch: Watch) -> Samples:
    """Start an engine, measure every round of `plan` on it, and end it.

    On CPU its KV pool is as large as the plan needs; on a GPU it is vLLM's own share of the memory, and batches that
    do not fit it are left out.

    Raises:
        OfflineEngineError: the engine does not start, or a step fails or takes longer than `TIMEOUT_S`.
    """
    spec = EngineSpec(
        model,
        core=core,
        dtype=dtype,
        block_size_tokens=plan.block_size_tokens,
        num_blocks=None if is_cuda else plan.num_blocks,
        max_num_seqs=plan.max_batch,
        max_num_batched_tokens=max(FILL_TOKENS, *plan.prefill_tokens),
        max_model_len_tokens=plan.max_model_len_tokens,
        enforce_eager=not is_cuda,  # as `tetri instance` serves
    )
    watch(f"loading {model}")
    with EngineProcess(spec) as process:
        process.wait_until_ready(CUDA_START_TIMEOUT_S if is_cuda else START_TIMEOUT_S)
        samples = Samples(process.call(describe))
        batches = _fitting(plan, samples.engine["kv_cache_tokens"])
        watch("warming up")
        for num_tokens in plan.prefill_tokens:  # kernels choose their plans by shape, once
            process.call(prefill_ms, num_tokens, timeout_s=TIMEOUT_S)
        for number in range(plan.num_rounds):
            start_s = time.monotonic()
            _measure_round(process, plan, batches, number, samples)
            watch(f"round {number + 1} of {plan.num_rounds} took {time.monotonic() - start_s:.0f} s")
    return samples


def _fitting(plan: ProfilePlan, kv_cache_tokens: int) -> dict[int, tuple[int, ...]]:
    """The plan's batches that fit the KV pool."""
    fitting = {
        context: tuple(b for b in batches if b * (context + GROWTH_TOKENS) <= kv_cache_tokens)
        for context, batches in plan.decode_batches.items()
    }
    return {context: batches for context, batches in fitting.items() if batches}


def _measure_round(
    process: EngineProcess, plan: ProfilePlan, batches: dict[int, tuple[int, ...]], number: int, samples: Samples
) -> None:
    """All points once (or `passes` times), in an order of their own, so that no size has the machine's good minutes."""
    tasks: list[tuple[str, int]] = [("prefill", size) for size in plan.prefill_tokens] * plan.passes
    tasks += [("decode", context) for context in batches]
    random.Random(number).shuffle(tasks)
    for kind, num_tokens in tasks:
        if kind == "prefill":
            step_ms = process.call(prefill_ms, num_tokens, timeout_s=TIMEOUT_S)
            samples.prefill.append(PrefillSample(number, num_tokens, step_ms))
            continue
        for batch_size, sum_context_tokens, step_ms in process.call(
            decode_ms, num_tokens, batches[num_tokens], plan.num_decode_steps, timeout_s=TIMEOUT_S
        ):
            samples.decode.append(DecodeSample(number, batch_size, num_tokens, sum_context_tokens, step_ms))


def describe(engine: Any) -> dict[str, Any]:
    """What the engine computes with. Runs inside the engine's process."""
    from vllm.platforms import current_platform

    config = engine.core.vllm_config
    pool = engine.scheduler.kv_cache_manager.block_pool
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": current_platform.device_type,
        "device_name": current_platform.get_device_name(),
        "kv_cache_tokens": (pool.num_gpu_blocks - 1) * config.cache_config.block_size,  # one is vLLM's null block
    }


def prefill_ms(engine: Any, num_tokens: int) -> float:
    """The step that prefills one prompt of `num_tokens`. Runs inside the engine's process."""
    engine.forget()
    _add(engine, num_tokens, 1)
    engine.run(TIMEOUT_S)
    (step,) = engine.steps
    return 1000.0 * float(step.duration_s)


def decode_ms(
    engine: Any, context_tokens: int, batch_sizes: Sequence[int], num_steps: int
) -> list[tuple[int, int, float]]:
    """Steps of decode batches of prompts of `context_tokens`: (batch size, sum of contexts, ms) per step.

    The largest batch is prefilled, then thinned out: prompts are prefilled once for all batch sizes. The first step
    of each size warms up. Runs inside the engine's process.
    """
    engine.forget()
    running = [_add(engine, context_tokens, GROWTH_TOKENS) for _ in range(max(batch_sizes))]
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(engine.requests[id].token_times_s for id in running):
        engine.step()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(running)} prompts of {context_tokens} tokens take longer than {TIMEOUT_S:g} s")
    found = []
    for batch_size in sorted(batch_sizes, reverse=True):
        engine.core.abort_requests(running[batch_size:])
        running = running[:batch_size]
        for i in range(num_steps + 1):
            sum_context_tokens = sum(engine.scheduler.requests[id].num_tokens for id in running)
            engine.step()
            step = engine.steps[-1]
            if (step.num_decode_tokens, step.num_prompt_tokens) != (batch_size, 0):
                raise RuntimeError(f"a batch of {batch_size} became {step}")
            if i:
                found.append((batch_size, sum_context_tokens, 1000.0 * float(step.duration_s)))
    engine.core.abort_requests(running)
    return found


def _add(engine: Any, num_tokens: int, max_tokens: int) -> str:
    id = uuid.uuid4().hex
    engine.add(id, [7 + i % (engine.vocabulary_size - 7) for i in range(num_tokens)], max_tokens)
    return id


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients in ms, none negative, and how far the model is from the measured medians, relative to them."""

    coefficients: tuple[float, float, float]
    median_error: float
    max_error: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What follows from samples. Medians in ms: by tokens, and by (batch size, context tokens).

    `has_levelled_off`: the longest prompt's throughput is not above the plateau, as far as 95 % tell them apart.
    `spread`: how far apart repetitions are, interquartile range over median, of the typical prefill size.
    """

    prefill_ms: dict[int, float]
    decode_ms: dict[tuple[int, int], float]
    plateau_tokens_per_s: float
    saturation_tokens: int
    chunk_tokens: int
    has_levelled_off: bool
    spread: float
    prefill_fit: Fit
    decode_fit: Fit


def summarise(samples: Samples, block_size_tokens: int) -> Profile:
    """Medians, saturation point, chunk size and cost model of what was measured."""
    prefill, decode = by_tokens(samples), by_batch(samples)
    prefill_ms = {size: median(steps) for size, steps in prefill.items()}
    decode_ms = {key: median(one.step_ms for one in steps) for key, steps in decode.items()}
    terms = [(1, median(one.sum_context_tokens for one in steps), key[0]) for key, steps in decode.items()]
    saturation_tokens, plateau = saturation(prefill_ms)
    return Profile(
        prefill_ms,
        decode_ms,
        plateau,
        saturation_tokens,
        chunk_tokens=block_size_tokens * _blocks(saturation_tokens, block_size_tokens),
        has_levelled_off=PLATEAU_SHARE * 1000.0 * max(prefill_ms) / prefill_ms[max(prefill_ms)] <= plateau,
        spread=median(_spread(steps) for steps in prefill.values()),
        prefill_fit=fit([(1, n, n * n) for n in prefill_ms], list(prefill_ms.values())),
        decode_fit=fit(terms, list(decode_ms.values())),
    )


def _spread(values: Sequence[float]) -> float:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float((high - low) / middle)


def by_tokens(samples: Samples) -> dict[int, list[float]]:
    """Prefill steps in ms by prompt tokens, ascending."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for one in samples.prefill:
        found[one.num_tokens].append(one.step_ms)
    return dict(sorted(found.items()))


def by_batch(samples: Samples) -> dict[tuple[int, int], list[DecodeSample]]:
    """Decode steps by (batch size, context tokens), ascending."""
    found: defaultdict[tuple[int, int], list[DecodeSample]] = defaultdict(list)
    for one in samples.decode:
        found[one.batch_size, one.context_tokens].append(one)
    return dict(sorted(found.items()))


def saturation(prefill_ms: Mapping[int, float]) -> tuple[int, float]:
    """(Smallest size whose throughput is at least 95 % of the plateau, the plateau in tokens per second).

    The plateau is the median of the three highest throughputs: one lucky size does not raise it, and where attention
    makes long prompts slower again, they do not lower it.
    """
    rates = {size: 1000.0 * size / step_ms for size, step_ms in prefill_ms.items()}
    plateau = median(sorted(rates.values())[-3:])
    return min(size for size, rate in rates.items() if rate >= PLATEAU_SHARE * plateau), plateau


def fit(terms: Sequence[tuple[float, float, float]], step_ms: Sequence[float]) -> Fit:
    """Least squares of relative errors with no negative coefficient; relative, or long steps alone would decide.

    Args:
        terms: what the coefficients multiply, (points, 3).
        step_ms: measured, (points,).
    """
    measured = np.asarray(step_ms, dtype=float)
    weighted = np.asarray(terms, dtype=float) / measured[:, None]
    scale = weighted.max(axis=0)  # squared tokens beside a constant: equal columns keep the solver exact
    scaled, _ = nnls(weighted / scale, np.ones(len(measured)))
    errors = np.abs(weighted @ (scaled / scale) - 1.0)
    a, b, c = (float(x) for x in scaled / scale)
    return Fit((a, b, c), float(np.median(errors)), float(errors.max()))
