"""`overhead`: what our scheduler adds to an engine step, against vLLM's own.

Two engines of the same model on the same core, one with vLLM's scheduler and one with ours, take turns in blocks of
steps; the other is stopped (SIGSTOP) meanwhile, threads and all. Scheduler time is `schedule`, `update_from_output` and
`add_request`; goal: ours adds at most 2 % of vLLM's step. What our connector prepares inside `schedule` counts as
ours, since vLLM's engine here has no connector at all; our load feed's thread is in the whole step's time alone.
Prefix caching is off in both, as it is on CPU.

Decode, 16 / 64 / 256 running requests with short contexts, under three conditions:
  no queue   nobody waits
  vetoed     64 requests wait: with us because the admission policy refuses them (their prompts would fit, their
             outputs would not), with vLLM for want of a seat, since it knows no such reason
  arriving   the same, and one more comes in every step, so that our policy judges the whole queue in every step
Prefill, 64 / 256 prompts of 256-512 tokens queued, at most 128 tokens in a step: vLLM's FCFS, our SJF. The paper: to
sort costs 10s to 100s of microseconds.

On a tiny OPT, made on the spot, a step is as short as a step can be, so the share is at its largest: that is a stress
test of the code, not a model that anybody serves. Bounds are over the rounds: one-sided, 95 %.

`--short` measures the tiny OPT only, shows that it works, and measures nothing worth quoting.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.engines import cores
from benchmarks.record import Record, deliver, save_figure, say
from pipeline.target import TINY_OPT, make_target
from serving_plugin.bench.metrics import PairedRatio, paired_ratio
from serving_plugin.core.config import AdmitSettings, ChunkSettings, InstanceSettings, OrderSettings, TransferSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import Role, num_blocks
from serving_plugin.engine.offline_process import EngineProcess, EngineSpec

GOAL = 0.02  # of a step
STOCK, OURS = "vLLM", "ours"
NO_QUEUE, VETOED, ARRIVING = CONDITIONS = ("no queue", "vetoed", "arriving")
BLOCK_TOKENS, CHUNK_TOKENS, SHORT_PROMPT_TOKENS = 32, 128, 8
QUEUED_PROMPT_TOKENS = (256, 512)
NUM_WARM_STEPS = 2  # of a block, not counted: caches are cold after the other engine's turn
MAX_FILL_STEPS = 8
NUM_FORECAST_BUCKETS = 20
MAX_OUTPUT_TOKENS = 100_000  # nobody ends by himself
CALL_TIMEOUT_S = 300.0

__all__ = ["deliver", "draw", "run"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. Steps of a block are a multiple of how often a queue without news is judged (8)."""

    num_rounds: int = 5
    num_steps: int = 16
    num_prefill_steps: int = 8
    num_running: tuple[int, ...] = (16, 64, 256)
    num_waiting: int = 64
    num_queued: tuple[int, ...] = (64, 256)
    policies: tuple[str, ...] = ("reserve_dynamic", "reserve_peak", "reserve_expected")


SHORT = Extent(num_rounds=1, num_steps=8, num_prefill_steps=4, num_running=(16, 64), num_queued=(64,))


@dataclass(slots=True, kw_only=True)
class OverheadResult(Record):
    """One row per condition and round; per engine the seconds of every step: scheduler and whole."""

    extent: dict[str, Any]
    models: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every condition of every model brought figures."""
        extent = Extent(**self.extent)
        return len(self.rows) == len(self.models) * extent.num_rounds * len(cases(extent))

    def tables(self) -> Iterator[Table]:
        """One table per model."""
        for model in self.models:
            table = Table(
                title=f"{model}: scheduler time per step of vLLM's, what ours adds; goal: {GOAL:.0%} of the step"
            )
            table.add_column("case", no_wrap=True)
            for column in ("step, ms", "scheduler, us", "ours adds, us", "median"):
                table.add_column(column, justify="right")
            for column in ("of the step [95 %]", "goal", "whole step [95 %]"):
                table.add_column(column, justify="right", no_wrap=True)
            for case in cases(Extent(**self.extent)):
                rows = [row for row in self.rows if row["model"] == model and row["case"] == asdict(case)]
                if rows:
                    table.add_row(case.text, *figures(rows))
            yield table


@dataclass(frozen=True, slots=True)
class Case:
    """`num_requests`: running ones in role decode, queued ones in role prefill."""

    role: str
    num_requests: int
    condition: str
    policy: str

    @property
    def text(self) -> str:
        """As a table names it."""
        what = "prompts" if self.role == Role.PREFILL else "decodes"
        return f"{self.num_requests} {what}, {self.condition}, {self.policy}"


def cases(extent: Extent) -> list[Case]:
    """All of them, in the order of the table. Without a queue no policy is asked: one of them stands for all."""
    decode = [
        Case(Role.DECODE.value, number, condition, policy)
        for number in extent.num_running
        for policy in extent.policies
        for condition in conditions(extent, policy)
    ]
    return decode + [Case(Role.PREFILL.value, number, "queued", "sjf") for number in extent.num_queued]


def conditions(extent: Extent, policy: str) -> tuple[str, ...]:
    """Those under which `policy` is measured."""
    return CONDITIONS if policy == extent.policies[0] else (VETOED, ARRIVING)


def mean_scheduler_s(row: dict[str, Any], name: str) -> float:
    """Scheduler time of a step, mean over a block."""
    return float(np.mean(row[name]["scheduler_s"]))


def mean_step_s(row: dict[str, Any], name: str) -> float:
    """Time of a whole step, mean over a block."""
    return float(np.mean(row[name]["duration_s"]))


def added_share(rows: Sequence[dict[str, Any]]) -> PairedRatio | None:
    """(vLLM's step + what our scheduler adds) / vLLM's step, round by round."""
    steps = [mean_step_s(row, STOCK) for row in rows]
    added = [mean_scheduler_s(row, OURS) - mean_scheduler_s(row, STOCK) for row in rows]
    return paired_ratio([step_s + added_s for step_s, added_s in zip(steps, added, strict=True)], steps)


def figures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line of the table from a case's rounds."""
    pooled = {name: np.concatenate([row[name]["scheduler_s"] for row in rows]) for name in (STOCK, OURS)}
    share = added_share(rows)
    whole = paired_ratio([mean_step_s(row, OURS) for row in rows], [mean_step_s(row, STOCK) for row in rows])
    assert share is not None and whole is not None  # a step takes time
    return [
        f"{1e3 * np.mean([mean_step_s(row, STOCK) for row in rows]):.1f}",
        f"{1e6 * pooled[STOCK].mean():.0f}",
        f"{1e6 * (pooled[OURS].mean() - pooled[STOCK].mean()):.0f}",
        f"{1e6 * (np.median(pooled[OURS]) - np.median(pooled[STOCK])):.0f}",
        _percent(share),
        verdict(share),
        _percent(whole),
    ]


def verdict(share: PairedRatio) -> str:
    """`met` or `missed` where the bounds say so; `open` where they do not, or there are too few rounds."""
    if share.meets(1 + GOAL):
        return "met"
    return "missed" if share.lower_95 is not None and share.lower_95 > 1 + GOAL else "open"


def _percent(ratio: PairedRatio) -> str:
    mean = f"{100 * (ratio.mean - 1):+.2f} %"
    if ratio.lower_95 is None or ratio.upper_95 is None:
        return mean
    return f"{mean} [{100 * (ratio.lower_95 - 1):+.2f}, {100 * (ratio.upper_95 - 1):+.2f}]"


# Inside an engine's process


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests to keep running, and what waiting ones look like: sized so that the pool is promised to its last block
    once the batch runs, and a waiting one needs more than any running one gives back."""

    num_running: int
    high_tokens: int
    waiting_prompt_tokens: int


def process_id(engine: Any) -> int:
    """Of the engine's process."""
    return os.getpid()


def fill(engine: Any, batch: Batch) -> None:
    """Have the batch decode in every step from here on, until `clear`."""
    if not _is_ours(engine):
        engine.scheduler.max_num_active_reqs = batch.num_running
    for i in range(batch.num_running):
        _add(engine, f"run-{i}", SHORT_PROMPT_TOKENS, batch)
    for _ in range(MAX_FILL_STEPS):
        engine.step()
        if len(engine.scheduler.running) == batch.num_running and not engine.scheduler.waiting:
            return
    raise RuntimeError(f"{len(engine.scheduler.running)} of {batch.num_running} requests run")


def decode_block(engine: Any, batch: Batch, num_steps: int, num_waiting: int, is_arriving: bool) -> dict[str, Any]:
    """The batch's next steps with so many requests waiting, one more in every step if `is_arriving`."""
    for i in range(num_waiting):
        _add(engine, f"wait-{i}", batch.waiting_prompt_tokens, batch)
    for i in range(NUM_WARM_STEPS + num_steps):
        if i == NUM_WARM_STEPS:
            engine.steps.clear()
        if is_arriving:
            _add(engine, f"late-{i}", batch.waiting_prompt_tokens, batch)
        engine.step()
    num_left = num_waiting + is_arriving * (NUM_WARM_STEPS + num_steps)
    found = len(engine.scheduler.running), len(engine.scheduler.waiting)
    if found != (batch.num_running, num_left):
        raise RuntimeError(f"{found} requests run and wait, not {(batch.num_running, num_left)}")
    waiting = [request.request_id for request in engine.scheduler.waiting]
    return _taken(engine, num_steps, waiting)


def prefill_block(engine: Any, num_queued: int, num_steps: int, seed: int) -> dict[str, Any]:
    """Steps of `CHUNK_TOKENS` with `num_queued` prompts in the queue at the start; none is left at the end."""
    rng = random.Random(seed)
    if not _is_ours(engine):
        engine.scheduler.max_num_scheduled_tokens = CHUNK_TOKENS
    for i in range(num_queued):
        engine.add(f"prompt-{i}", _prompt(rng.randint(*QUEUED_PROMPT_TOKENS)), 1)
    for i in range(NUM_WARM_STEPS + num_steps):
        if i == NUM_WARM_STEPS:
            engine.steps.clear()
        engine.step()
    return _taken(engine, num_steps, list(engine.scheduler.requests))


def clear(engine: Any) -> None:
    """End everything; the engine may be configured anew."""
    _abort(engine, list(engine.scheduler.requests))
    while engine.scheduler.has_requests():
        engine.step()
    engine.forget()


def configure(engine: Any, settings: InstanceSettings) -> None:
    """Other policies for ours."""
    engine.configure(settings)


def _is_ours(engine: Any) -> bool:
    return hasattr(engine.scheduler, "tetri_tracker")


def _taken(engine: Any, num_steps: int, to_abort: Sequence[str]) -> dict[str, Any]:
    steps = list(engine.steps)
    if len(steps) != num_steps:
        raise RuntimeError(f"{len(steps)} of {num_steps} steps computed something")
    _abort(engine, to_abort)
    return {
        "scheduler_s": [round(step.scheduler_s, 7) for step in steps],
        "duration_s": [round(step.duration_s, 7) for step in steps],
    }


def _abort(engine: Any, ids: Sequence[str]) -> None:
    from vllm.v1.request import RequestStatus

    engine.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)


def _add(engine: Any, id: str, num_prompt_tokens: int, batch: Batch) -> None:
    low, high = batch.high_tokens - 1, batch.high_tokens
    # As many buckets as a real forecast has, which is what reserve_expected's time depends on; nearly all in the last.
    edges = [low * i // NUM_FORECAST_BUCKETS for i in range(NUM_FORECAST_BUCKETS + 1)]
    rest = 1e-5
    meta = {
        "request_id": id,
        "forecast": {
            "edges_tokens": [*edges, high],
            "probabilities": [rest] * NUM_FORECAST_BUCKETS + [1.0 - rest * NUM_FORECAST_BUCKETS],
        },
        "length_range": [low, high],
        "is_heavy_decode": True,
    }
    engine.add(id, _prompt(num_prompt_tokens), MAX_OUTPUT_TOKENS, kv_transfer_params={"tetri": meta})


def _prompt(num_tokens: int) -> list[int]:
    return [10 + i % 200 for i in range(num_tokens)]


# The rounds


class Rivals:
    """Both engines, one awake at a time."""

    def __init__(self, model: Path, num_pool_blocks: int, kv_cache_gib: int, stack: ExitStack) -> None:
        self._engines: dict[str, EngineProcess] = {}
        for name, settings in ((STOCK, None), (OURS, settings_of(Role.DECODE, "reserve_dynamic"))):
            spec = EngineSpec(
                str(model),
                settings,
                core=cores()[0],
                block_size_tokens=BLOCK_TOKENS,
                num_blocks=num_pool_blocks,
                kv_cache_gib=kv_cache_gib,
                max_num_seqs=512,
            )
            self._engines[name] = stack.enter_context(EngineProcess(spec))
        self._pids = {name: engine.call(process_id) for name, engine in self._engines.items()}
        for pid in self._pids.values():
            stack.callback(os.kill, pid, signal.SIGCONT)  # before it is closed: who is stopped cannot leave
            os.kill(pid, signal.SIGSTOP)

    def call(self, name: str, function: Any, *args: Any) -> Any:
        """Run `function` in one engine while the other one sleeps."""
        os.kill(self._pids[name], signal.SIGCONT)
        answer = self._engines[name].call(function, *args, timeout_s=CALL_TIMEOUT_S)
        os.kill(self._pids[name], signal.SIGSTOP)
        return answer

    def call_both(self, number: int, function: Any, *args: Any) -> dict[str, Any]:
        """Both, one after the other, the first one in turn by `number`."""
        names = (STOCK, OURS) if number % 2 == 0 else (OURS, STOCK)
        return {name: self.call(name, function, *args) for name in names}


def settings_of(role: Role, policy: str) -> InstanceSettings:
    """An instance whose vetoes do not age while they are measured."""
    return InstanceSettings(
        role,
        "o",
        "http://offline",
        order=OrderSettings("sjf"),
        chunk=ChunkSettings(chunk_tokens=CHUNK_TOKENS if role is Role.PREFILL else 0),
        admit=AdmitSettings(policy if role is Role.DECODE else "greedy", max_veto_s=3600.0),
        transfer=TransferSettings("direct"),
    )


def pool_blocks(extent: Extent) -> int:
    """A pool that the largest batch fills at its longest; a multiple of each batch's size, so that no block is over."""
    largest = max(extent.num_running)
    return largest * num_blocks(_num_tokens_at_end(extent), BLOCK_TOKENS)


def batch_of(extent: Extent, num_running: int) -> Batch:
    """`num_running` requests that are promised the whole pool, and waiting ones that a running one's share cannot hold,
    however much of its range is used up."""
    share_tokens = pool_blocks(extent) // num_running * BLOCK_TOKENS
    longer_tokens = _num_tokens_at_end(extent) + BLOCK_TOKENS
    return Batch(num_running, share_tokens - SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS + longer_tokens)


def _num_tokens_at_end(extent: Extent) -> int:
    """Tokens of a running request when the last block of its batch is over."""
    num_steps = extent.num_rounds * len(CONDITIONS) * (NUM_WARM_STEPS + extent.num_steps)
    return SHORT_PROMPT_TOKENS + MAX_FILL_STEPS + num_steps


def run(model: Path, is_short: bool) -> OverheadResult:
    """Measure on this machine."""
    extent = SHORT if is_short else Extent()
    if not is_short and not (model / "config.json").is_file():
        raise ConfigurationError(f"{model} holds no model: run `dvc repro target` or give --model")
    with tempfile.TemporaryDirectory(prefix="tetri-overhead-") as scratch:
        tiny = make_target(TINY_OPT, Path(scratch) / TINY_OPT)
        models = [tiny] if is_short else [model, tiny]
        result = OverheadResult(extent=asdict(extent), models=[one.name for one in models])
        for one in models:
            with ExitStack() as stack:
                say(f"{one.name}: starting vLLM's engine and ours")
                # GiB for the pool and as much again: 135 million parameters keep 45,000 tokens in one
                rivals = Rivals(one, pool_blocks(extent), 1 + pool_blocks(extent) * BLOCK_TOKENS // 40_000, stack)
                for row in measure(rivals, extent, one.name):
                    result.rows.append({"model": one.name, **row})
    return result


def measure(rivals: Rivals, extent: Extent, name: str) -> Iterator[dict[str, Any]]:
    """All cases of one model, a batch at a time, its conditions in turn in each round."""
    for policy in extent.policies:
        rivals.call(OURS, configure, settings_of(Role.DECODE, policy))
        for num_running in extent.num_running:
            say(f"{name}: {num_running} decodes, {policy}")
            batch = batch_of(extent, num_running)
            rivals.call_both(0, fill, batch)
            for number in range(extent.num_rounds):
                for condition in conditions(extent, policy):
                    num_waiting = 0 if condition == NO_QUEUE else extent.num_waiting
                    found = rivals.call_both(
                        number, decode_block, batch, extent.num_steps, num_waiting, condition == ARRIVING
                    )
                    case = Case(Role.DECODE.value, num_running, condition, policy)
                    yield {"case": asdict(case), "round": number, **found}
            rivals.call_both(0, clear)
    rivals.call(OURS, configure, settings_of(Role.PREFILL, "sjf"))
    for num_queued in extent.num_queued:
        say(f"{name}: {num_queued} prompts queued")
        for number in range(extent.num_rounds):
            found = rivals.call_both(number, prefill_block, num_queued, extent.num_prefill_steps, number)
            rivals.call_both(0, clear)
            case = Case(Role.PREFILL.value, num_queued, "queued", "sjf")
            yield {"case": asdict(case), "round": number, **found}


# Figure

_COLORS = {NO_QUEUE: "#94a3b8", VETOED: "#6366f1", ARRIVING: "#d97706", "queued": "#0f766e"}


def draw(result: OverheadResult, path: Path) -> None:
    """Added share of a step per case, one panel per model, with the goal."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "tetri"}):
        figure = Figure(figsize=(5.5 * len(result.models), 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(result.models), squeeze=False)[0]
        for axes, model in zip(panels, result.models, strict=True):
            _draw_model(result, axes, model)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle("What our scheduler adds to a step of vLLM")
        save_figure(figure, path)


def _draw_model(result: OverheadResult, axes: Any, model: str) -> None:
    by_case = [
        (case, share)
        for case in cases(Extent(**result.extent))
        if (rows := [row for row in result.rows if row["model"] == model and row["case"] == asdict(case)])
        and (share := added_share(rows)) is not None
    ]
    for condition in dict.fromkeys(case.condition for case, _ in by_case):
        places = [place for place, (case, _) in enumerate(by_case) if case.condition == condition]
        shares = [by_case[place][1] for place in places]
        means = [100 * (share.mean - 1) for share in shares]
        axes.bar(places, means, 0.8, color=_COLORS[condition], label=condition)
        lows = [100 * ((share.lower_95 or share.mean) - 1) for share in shares]
        highs = [100 * ((share.upper_95 or share.mean) - 1) for share in shares]
        axes.vlines(places, lows, highs, color="#334155", linewidth=0.8)
    axes.axhline(100 * GOAL, color="#b91c1c", linewidth=0.9, linestyle=":", label=f"goal: {GOAL:.0%}")
    labels = [f"{case.num_requests}, {case.policy.removeprefix('reserve_')}" for case, _ in by_case]
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right")
    axes.set(title=model, xlabel="requests, policy", ylabel="added to vLLM's step, %")
