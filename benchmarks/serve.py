"""`serve`: the paper's five workloads (figures 11-15) on TetriServe and on plain vLLM.

The same harness as `tetri bench --compare`. `--short` shows that it works and measures nothing worth quoting.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving_plugin.bench.compare import BenchResult, MeasureOptions
from serving_plugin.bench.console import ConsoleWatcher, deliver
from serving_plugin.bench.session import (
    Comparison,
    WorkloadOptions,
    bench_compared,
    default_context_tokens,
    draw_workloads,
)
from serving_plugin.bench.systems import SystemName, SystemSettings, default_chunk_tokens, detect_hardware, plan_system
from serving_plugin.bench.workloads import WorkloadName

__all__ = ["deliver", "run"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    workloads: tuple[WorkloadName, ...]
    systems: tuple[SystemName, ...]
    seeds: tuple[int, ...]
    num_requests: int
    rate_per_s: float
    tune_chunks: tuple[int, ...]
    max_output_tokens: int


# 128 requests as in the paper; five pairs, the fewest that a claim may rest on. The rate is worked out, not measured:
# heavy prompts average about 930 tokens, and one core prefills 500-600 tokens/s of SmolLM2-135M, so that one prefill
# instance is overrun from about 0.6/s on.
FULL = Extent(
    workloads=tuple(WorkloadName),
    systems=tuple(SystemName),
    seeds=(0, 1, 2, 3, 4),
    num_requests=128,
    rate_per_s=0.5,
    tune_chunks=(64, 128, 256, 512),
    max_output_tokens=256,
)
SHORT = Extent(
    workloads=(WorkloadName.MIXED,),
    systems=(SystemName.TETRISERVE, SystemName.COUPLED),
    seeds=(0,),
    num_requests=12,
    rate_per_s=2.0,
    tune_chunks=(),
    max_output_tokens=160,
)


def run(model: Path, source: str, is_short: bool) -> BenchResult:
    """Measure on this machine."""
    extent = SHORT if is_short else FULL
    hardware = detect_hardware()
    context_tokens = default_context_tokens(model)
    settings = SystemSettings(
        model=model,
        hardware=hardware,
        max_model_len_tokens=context_tokens,
        chunk_tokens=default_chunk_tokens(hardware),
        prefill_chunk_tokens=default_chunk_tokens(hardware),
    )
    for name in extent.systems:
        plan_system(name, settings, range(1, settings.num_servers + 1))  # refuses a missing command before long work
    options = WorkloadOptions(
        names=extent.workloads,
        seeds=extent.seeds,
        num_requests=extent.num_requests,
        rate_per_s=extent.rate_per_s,
        source=source,
        max_output_tokens=extent.max_output_tokens,
    )
    with ConsoleWatcher() as watcher:
        workloads = draw_workloads(options, model, context_tokens, watcher)
        comparison = Comparison(extent.systems, extent.tune_chunks)
        measured = MeasureOptions(max_output_tokens=extent.max_output_tokens)
        return bench_compared(comparison, workloads, settings, measured, watcher)
