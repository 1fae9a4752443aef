"""One benchmark from settings to result: load the data, draw the workloads, measure, put together.

Shared by `tetri bench` and `python -m benchmarks serve`, so that both measure the same way.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from serving_plugin.bench.compare import (
    BenchResult,
    MeasureOptions,
    RunResult,
    TuneStep,
    Watcher,
    best_chunk,
    compare_systems,
    make_result,
    measure_urls,
    tune_chunk,
)
from serving_plugin.bench.loadgen import LoadOptions, fetch_model_name
from serving_plugin.bench.metrics import measure
from serving_plugin.bench.systems import SystemName, SystemSettings
from serving_plugin.bench.workloads import (
    FULL_CONTEXT_TOKENS,
    LengthSource,
    Workload,
    WorkloadName,
    WorkloadSpec,
    load_tokenizer,
    make_workload,
    model_context_tokens,
    read_pairs,
)
from serving_plugin.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Which workloads to draw: every name of every seed."""

    names: tuple[WorkloadName, ...]
    seeds: tuple[int, ...]
    num_requests: int
    rate_per_s: float | None
    source: str = "sharegpt"
    length_source: LengthSource = LengthSource.SHAREGPT
    max_output_tokens: int = 256
    max_prompt_tokens: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigurationError("no workload named; give --workload, for example mixed")
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ConfigurationError(f"--seeds {list(self.seeds)}: give each seed once, at least one")


def default_context_tokens(model: Path) -> int:
    """The model's own context, at most the paper's 2,048: a longer one only makes servers reserve more."""
    return min(model_context_tokens(model), FULL_CONTEXT_TOKENS[LengthSource.SHAREGPT])


def draw_workloads(
    options: WorkloadOptions, model: Path, max_model_len_tokens: int, watcher: Watcher
) -> list[list[Workload]]:
    """`[repetition][workload]`, a repetition per seed. Specs are checked before the data is read."""
    specs = [
        [
            WorkloadSpec(
                name=name,
                num_requests=options.num_requests,
                seed=seed,
                max_model_len_tokens=max_model_len_tokens,
                rate_per_s=options.rate_per_s,
                length_source=options.length_source,
                max_output_tokens=options.max_output_tokens,
                max_prompt_tokens=options.max_prompt_tokens,
                scale=options.scale,
            )
            for name in options.names
        ]
        for seed in options.seeds
    ]
    tokenizer = load_tokenizer(model)
    watcher.stage(f"reading prompts from {options.source}")
    pairs = read_pairs(options.source)
    watcher.stage(f"drawing {sum(len(row) for row in specs)} workload(s) from {len(pairs)} conversations")
    return [[make_workload(spec, pairs, tokenizer, options.source) for spec in row] for row in specs]


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """Servers that run already. `served_model` None: ask the first one."""

    base_urls: tuple[str, ...]
    served_model: str | None = None
    label: str = "server"


def resolved(target: ServerTarget) -> ServerTarget:
    """`target` with its model's name. Raises `ConfigurationError` for a bad URL or a server that does not answer."""
    LoadOptions(target.base_urls, "")
    if target.served_model is not None:
        return target
    return replace(target, served_model=asyncio.run(fetch_model_name(target.base_urls[0])))


def bench_running(
    target: ServerTarget,
    workloads: Sequence[Sequence[Workload]],
    options: MeasureOptions,
    model: Path,
    watcher: Watcher,
) -> BenchResult:
    """Replay the workloads against running servers."""
    target = resolved(target)
    started_s = time.time()
    runs = asyncio.run(_measure_running(target, workloads, options, watcher))
    flat = [workload for row in workloads for workload in row]
    settings = {"model": str(model), "base_urls": ", ".join(target.base_urls), **_option_facts(options)}
    return make_result(runs, flat, settings, started_s)


async def _measure_running(
    target: ServerTarget, workloads: Sequence[Sequence[Workload]], options: MeasureOptions, watcher: Watcher
) -> list[RunResult]:
    model = target.served_model or ""
    title = f"{model} at {', '.join(target.base_urls)}"
    runs = []
    for repetition, row in enumerate(workloads):
        for workload in row:
            load = LoadOptions(
                base_urls=target.base_urls,
                model=model,
                lengths=options.lengths,
                max_output_tokens=options.max_output_tokens,
                temperature=options.temperature,
                request_timeout_s=options.request_timeout_s,
                id_prefix=f"{target.label}-{repetition}-{os.urandom(3).hex()}",
            )
            name = f"{workload.spec.name} · seed {workload.spec.seed}"
            watcher.stage(name)
            started_s = time.time()
            records = await measure_urls(workload, load, options.num_warm_up, partial(watcher.load, name))
            figures = measure(records, options.slo)
            result = RunResult(
                system=target.label,
                title=title,
                workload=workload.spec.name.value,
                seed=workload.spec.seed,
                repetition=repetition,
                chunk_tokens=None,
                started_s=started_s,
                records=tuple(records),
                metrics=figures,
            )
            watcher.finished(result)
            runs.append(result)
    return runs


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which systems to compare, and the chunk sizes to try first (empty: the settings' own)."""

    systems: tuple[SystemName, ...]
    tune_chunks: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.systems or len(set(self.systems)) != len(self.systems):
            raise ConfigurationError(
                f"--systems {[s.value for s in self.systems]}: give each system once, at least one"
            )


def bench_compared(
    comparison: Comparison,
    workloads: Sequence[Sequence[Workload]],
    settings: SystemSettings,
    options: MeasureOptions,
    watcher: Watcher,
) -> BenchResult:
    """Tune if asked, then replay the workloads on every system in turn."""
    started_s = time.time()
    tuning: list[TuneStep] = []
    if comparison.tune_chunks:
        for chunk_tokens in comparison.tune_chunks:
            replace(settings, chunk_tokens=chunk_tokens)  # refuses a bad size before the first restart
        tuning = tune_chunk(comparison.tune_chunks, workloads[0][0], settings, options, watcher)
        settings = replace(settings, chunk_tokens=best_chunk(tuning))
    runs = compare_systems(comparison.systems, workloads, settings, options, watcher)
    flat = [workload for row in workloads for workload in row]
    facts = _system_facts(settings) | _option_facts(options) | {"chunk_is_tuned_here": bool(tuning)}
    return make_result(runs, flat, facts, started_s, tuning)


def _system_facts(settings: SystemSettings) -> dict[str, Any]:
    return {
        "model": str(settings.model),
        "hardware": settings.hardware.describe(),
        "num_prefill": settings.num_prefill,
        "num_decode": settings.num_decode,
        "max_model_len_tokens": settings.max_model_len_tokens,
        "chunk_tokens": settings.chunk_tokens,
        "prefill_chunk_tokens": settings.prefill_chunk_tokens,
        "kv_cache_gib_per_server": None if settings.hardware.gpus else settings.kv_cache_gib,
        "max_num_seqs": settings.max_num_seqs,
        "block_size_tokens": None if settings.hardware.gpus else settings.block_size_tokens,
        "dtype": settings.dtype or "the model's own",
        "tensor_parallel_size": settings.tensor_parallel_size,
        "extra_serve_args": " ".join(settings.extra_serve_args) or None,
        "extra_vllm_args": " ".join(settings.extra_vllm_args) or None,
    }


def _option_facts(options: MeasureOptions) -> dict[str, Any]:
    return {
        "lengths": options.lengths.value,
        "temperature": options.temperature,
        "request_timeout_s": options.request_timeout_s,
        "num_warm_up_per_server": options.num_warm_up,
    }
