"""`dispatch`: which decode instance takes a request, over 2 and 3 real decode instances (TetriInfer figure 19).

The policies are those of `core.dispatch`, run by the dispatcher that prefill instances run, promises included. The
instances are real engines with our scheduler, its default admission and a tiny OPT made on the spot; their own load
feeds tell the dispatcher every 100 ms. What is not real: prompts of 20 tokens are prefilled by the decode instance
itself, which hardly counts, and no gateway stands between reports and dispatcher.

Per instance 32 requests, half of them light (20-100 tokens of output), half heavy (300-599), in random order; the same
for every policy. They come as a Poisson process over a second, so that there are reports of loads, or all at once as
in the paper, so that there are only promises. Forecasts are buckets of 200 tokens: the true one (oracle), or the true
one in 74.9 % and a neighbour otherwise (the paper's accuracy); the instances' admission sees the same ones. A tight KV
pool holds an even share of the requests just about, a roomy one all requests of all instances, so that nothing but the
policy keeps them apart. A round's figure is the mean over its draws of requests.

Two instances have a core each. With more instances than cores all of them share all cores, so wall time tells of the
machine, too; the busiest instance's CPU seconds do not.

`--short` shows that it works and measures nothing worth quoting.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.engines import Job, Mailbox, cores, ratio_text
from benchmarks.record import Record, deliver, save_figure, say
from pipeline.target import TINY_OPT, make_target
from serving_plugin.core.config import DispatchSettings, ForecastSettings, InstanceSettings, TransferSettings
from serving_plugin.core.errors import TetriError
from serving_plugin.core.forecast import DEFAULT_GRANULARITY_TOKENS, LengthForecast, LengthRange
from serving_plugin.core.types import InstanceLoad, InstanceState, RequestInfo, Role
from serving_plugin.engine.dispatcher import Dispatcher
from serving_plugin.engine.load_feed import EngineSnapshot, LoadReceiver
from serving_plugin.engine.offline_process import EngineProcess, EngineSpec

PROMPT_TOKENS = 20
LIGHT_TOKENS = (20, 100)
MAX_TOKENS = 1000  # what clients ask for
ACCURACY = {"oracle": 1.0, "74.9 %": 0.749}
AT_RANDOM, AT_ONCE = "Poisson arrivals", "all at once"
POOL_BLOCKS = {"tight": 192, "roomy": 2048}
SETTINGS = ((AT_RANDOM, "tight"), (AT_ONCE, "tight"), (AT_ONCE, "roomy"))
OURS = "power_of_two_by_class"
PAPERS = "power_of_two"
Run = dict[str, Any]
Figure = Callable[[Run], float]
Setting = tuple[str, str]  # how requests arrive, KV pool
System = tuple[str, str]  # dispatch policy, forecasts
SYSTEMS: tuple[System, ...] = (
    (OURS, "74.9 %"),
    (PAPERS, "74.9 %"),
    ("random", "74.9 %"),
    ("imbalance", "74.9 %"),
    ("least_load", "74.9 %"),
    (OURS, "oracle"),
    (PAPERS, "oracle"),
)
BASE = SYSTEMS[0]
BLOCK_TOKENS = 32
IDLE_TIMEOUT_S = 10.0
RUN_TIMEOUT_S = 120.0
PAPER = (
    "Paper: power-of-two has the lowest total decode time, and the gap to random grows with the number of instances "
    "(left panel); on the slowest instance heavy:light is most even under power-of-two, worst under imbalance (right)"
)
_END = "end"  # in an instance's mailbox: no more requests

__all__ = ["deliver", "draw", "run"]


class BenchmarkError(TetriError):
    """The instances did not do what the experiment needs."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. `num_draws`: sets of requests in a round; `window_s`: over which they come at random."""

    num_rounds: int = 5
    num_draws: int = 2
    num_instances: tuple[int, ...] = (2, 3)
    num_requests: int = 32
    heavy_tokens: tuple[int, int] = (300, 599)
    window_s: float = 1.0


SHORT = Extent(1, num_draws=1, num_instances=(2,), num_requests=8, heavy_tokens=(210, 250), window_s=0.5)


@dataclass(slots=True, kw_only=True)
class DispatchResult(Record):
    """One row per run: who got what, and when it was done. Seconds, KV blocks, requests."""

    extent: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every run of every round brought figures."""
        extent = self.extent
        num_settings = len(SYSTEMS) * len(SETTINGS) * len(extent["num_instances"])
        return bool(len(self.runs) == num_settings * extent["num_rounds"] * extent["num_draws"])

    def by_round(self, figure: Figure, num_instances: int, setting: Setting, system: System) -> list[float]:
        """A figure of one system in one setting: the mean over the draws of each round."""
        wanted, by_round = (num_instances, *setting, *system), defaultdict[int, list[float]](list)
        for run in self.runs:
            if tuple(run[key] for key in _KEYS) == wanted:
                by_round[run["round"]].append(figure(run))
        return [float(np.mean(by_round[number])) for number in sorted(by_round)]

    def tables(self) -> Iterator[Table]:
        """One table per number of instances and setting."""
        for number, setting in product(self.extent["num_instances"], SETTINGS):
            arrivals, pool = setting
            table = Table(
                title=f"{number} decode instances, {self.extent['num_requests']} requests each, {arrivals}, "
                f"{pool} pool; ratios: {' '.join(BASE)} over the row [95 %]",
                caption=PAPER if setting == SETTINGS[-1] else None,
            )
            for column in ("policy", "forecasts"):
                table.add_column(column, no_wrap=True)
            for column in (*_FIGURES, *_RATIOS):
                table.add_column(column, justify="right")
            for system in SYSTEMS:
                means = [np.mean(self.by_round(figure, number, setting, system)) for figure in _FIGURES.values()]
                pairs = [
                    [self.by_round(figure, number, setting, one) for one in (BASE, system)]
                    for figure in _RATIOS.values()
                ]
                ratios = ["-" if system == BASE else ratio_text(ours, theirs) for ours, theirs in pairs]
                table.add_row(*system, *(f"{mean:.2f}" for mean in means), *ratios)
            yield table


_KEYS = ("num_instances", "arrivals", "pool", "policy", "forecasts")


def decode_s(run: Run) -> float:
    """Total decode time: first dispatch to last token of all instances."""
    return float(run["decode_s"])


def mean_jct_s(run: Run) -> float:
    """Dispatch to last token, mean over requests."""
    return float(run["mean_jct_s"])


def busiest_cpu_s(run: Run) -> float:
    """CPU time of the instance that computed longest."""
    return max(float(instance["cpu_s"]) for instance in run["instances"].values())


def heavy_to_light(run: Run) -> float:
    """(heavy + 1) / (light + 1) on the instance that was done last: finite, and what power_of_two compares."""
    last = max(run["instances"].values(), key=lambda instance: float(instance["done_s"]))
    return float((last["num_heavy"] + 1) / (last["num_light"] + 1))


def kv_balance(run: Run) -> float:
    """KV block seconds of the fullest instance over the mean; 1: perfectly even."""
    used = [float(instance["block_s"]) for instance in run["instances"].values()]
    return float(max(used) / np.mean(used))


def preemptions(run: Run) -> float:
    """Preempted requests of all instances."""
    return float(sum(instance["num_preemptions"] for instance in run["instances"].values()))


_FIGURES: dict[str, Figure] = {
    "decode time, s": decode_s,
    "busiest, CPU s": busiest_cpu_s,
    "mean JCT, s": mean_jct_s,
    "heavy: light": heavy_to_light,
    "KV, max/mean": kv_balance,
    "pre- empted": preemptions,
}
_RATIOS: dict[str, Figure] = {"decode time": decode_s, "CPU": busiest_cpu_s, "JCT": mean_jct_s}


# Requests


def make_jobs(num_jobs: int, heavy_tokens: tuple[int, int], window_s: float, seed: int) -> list[Job]:
    """Half light, half heavy in random order, arriving as a Poisson process with `num_jobs` expected in `window_s`."""
    rng = random.Random(seed)
    bounds = [LIGHT_TOKENS if i % 2 else heavy_tokens for i in range(num_jobs)]
    rng.shuffle(bounds)
    jobs, arrival_s = [], 0.0
    for i, (low, high) in enumerate(bounds):
        prompt = tuple(rng.choices(range(10, 250), k=PROMPT_TOKENS))
        jobs.append(Job(f"r{i}", prompt, rng.randint(low, high), MAX_TOKENS, arrival_s))
        arrival_s += rng.expovariate(num_jobs / window_s) if window_s else 0.0
    return jobs


def forecast_lengths(jobs: Sequence[Job], accuracy: float, seed: int) -> dict[str, LengthForecast]:
    """One bucket per job: the true one with probability `accuracy`, else a neighbour of it."""
    rng, width = random.Random(seed), DEFAULT_GRANULARITY_TOKENS
    forecasts = {}
    for job in jobs:
        bucket, is_right, side = job.num_output_tokens // width, rng.random() < accuracy, rng.choice((-1, 1))
        if not is_right:
            bucket = abs(bucket + side)  # below the first bucket there is none: the second
        forecasts[job.id] = LengthForecast.one_hot(LengthRange(bucket * width, (bucket + 1) * width))
    return forecasts


# Inside an instance's process


@dataclass(frozen=True, slots=True)
class Served:
    """What one instance did: when each request of its ended, CPU seconds in steps, blocks times seconds."""

    finished_s: dict[str, float]
    cpu_s: float
    block_s: float
    num_preemptions: int


def serve(engine: Any, jobs: Sequence[Job], mailbox: str, timeout_s: float) -> Served:
    """Decode those of `jobs` that come through `mailbox` until it says that no more will."""
    box, by_id = Mailbox(mailbox), {job.id: job for job in jobs}
    deadline_s = time.monotonic() + timeout_s
    is_over, cpu_s = False, 0.0
    while not is_over or engine.scheduler.has_unfinished_requests():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(engine.scheduler.requests)} requests still running after {timeout_s:g} s")
        for id, params in box.take().items():
            if id == _END:
                is_over = True
                continue
            job = by_id[id]
            engine.add(id, job.prompt_token_ids, job.max_tokens, job.num_output_tokens, params)
        began_s = time.process_time()
        if engine.step():
            cpu_s += time.process_time() - began_s
        elif not engine.scheduler.has_requests():
            time.sleep(0.001)
    num_total = engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one is vLLM's null block
    served = Served(
        {id: progress.finished_s for id, progress in engine.requests.items()},
        cpu_s,
        sum(step.duration_s * (num_total - step.num_free_blocks) for step in engine.steps),
        sum(progress.num_preemptions for progress in engine.requests.values()),
    )
    engine.forget()
    return served


def engine_id(engine: Any) -> str:
    """What the instance's load feed is named after."""
    return str(engine.scheduler.vllm_config.kv_transfer_config.engine_id)


def run_on(engine: Any, cores: Sequence[int]) -> None:
    """Let the engine's thread, the one that computes, run on `cores`."""
    os.sched_setaffinity(0, cores)


# The dispatcher's side


class LoadTable:
    """What a prefill instance's agent knows of the decode instances, from their own feeds."""

    def __init__(self) -> None:
        self._loads: dict[str, InstanceLoad] = {}

    def listen(self, instance: str, engine_id: str) -> LoadReceiver:
        """Start to follow an instance; the receiver is the caller's to close."""
        receiver = LoadReceiver(engine_id, partial(self._take, instance))
        receiver.start()
        return receiver

    def _take(self, instance: str, snapshot: EngineSnapshot, events: Sequence[Any]) -> None:
        before = self._loads.get(instance)
        self._loads[instance] = load_of(instance, 1 if before is None else before.sequence + 1, snapshot)

    def of(self, instances: Sequence[str]) -> list[InstanceLoad]:
        """The last report of each of `instances` that has reported."""
        return [load for instance in instances if (load := self._loads.get(instance)) is not None]

    def wait_until_idle(self, instances: Sequence[str]) -> None:
        """Block until each of `instances` has said that it has no request. Raises `BenchmarkError` after a while."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while sum(load.num_active + load.num_waiting == 0 for load in self.of(instances)) < len(instances):
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"not every decode instance said that it is idle within {IDLE_TIMEOUT_S:g} s")
            time.sleep(0.01)


def load_of(instance: str, sequence: int, snapshot: EngineSnapshot) -> InstanceLoad:
    """What a READY decode instance's agent would report."""
    shared = {name.name for name in fields(InstanceLoad)} & {name.name for name in fields(EngineSnapshot)}
    return InstanceLoad(
        id=instance,
        incarnation="only",
        role=Role.DECODE,
        role_epoch=0,
        state=InstanceState.READY,
        sequence=sequence,
        busy_fraction=snapshot.decode_busy,
        **{name: getattr(snapshot, name) for name in shared},
    )


def dispatch(dispatcher: Dispatcher, job: Job, forecast: LengthForecast) -> tuple[str, dict[str, Any]]:
    """(instance chosen, the request's "tetri" metadata there), as a prefill instance's agent has it."""
    in_force, source, length_range, is_heavy = dispatcher.classify(forecast, job.max_tokens)
    chosen = dispatcher.choose(
        RequestInfo(
            id=job.id,
            arrival_s=job.arrival_s,
            num_prompt_tokens=len(job.prompt_token_ids),
            max_tokens=job.max_tokens,
            forecast=in_force,
            length_range=length_range,
            is_heavy_decode=is_heavy,
        )
    )
    if chosen is None:
        raise BenchmarkError("no decode instance is READY")
    return chosen[0], {
        "request_id": job.id,
        "forecast": {"edges_tokens": list(in_force.edges_tokens), "probabilities": list(in_force.probabilities)},
        "forecast_source": source,
        "length_range": [length_range.low_tokens, length_range.high_tokens],
        "is_heavy_decode": is_heavy,
    }


def play(
    engines: Mapping[str, EngineProcess],
    table: LoadTable,
    jobs: Sequence[Job],
    forecasts: Mapping[str, LengthForecast],
    dispatcher: Dispatcher,
) -> dict[str, Any]:
    """Dispatch `jobs` at their arrivals, wait for their ends; the run's figures."""
    instances = list(engines)
    table.wait_until_idle(instances)
    with tempfile.TemporaryDirectory(prefix="tetri-dispatch-") as folder:
        for name, engine in engines.items():
            (Path(folder) / name).mkdir()
            engine.start_call(serve, list(jobs), str(Path(folder) / name), RUN_TIMEOUT_S)
        boxes = {name: Mailbox(str(Path(folder) / name)) for name in instances}
        sent: dict[str, tuple[str, float]] = {}
        start_s = time.perf_counter()
        for job in jobs:
            time.sleep(max(0.0, start_s + job.arrival_s - time.perf_counter()))
            dispatcher.update(table.of(instances), {name: name for name in instances})
            chosen, meta = dispatch(dispatcher, job, forecasts[job.id])
            sent[job.id] = chosen, time.perf_counter()
            boxes[chosen].put(job.id, {"tetri": meta})
        for box in boxes.values():
            box.put(_END, {})
        served = {name: engine.result(RUN_TIMEOUT_S + 10) for name, engine in engines.items()}
    return figures_of(jobs, sent, served)


def figures_of(
    jobs: Sequence[Job], sent: Mapping[str, tuple[str, float]], served: Mapping[str, Served]
) -> dict[str, Any]:
    """A run's figures. `sent`: instance and moment of each job's dispatch. Heavy and light by true lengths."""
    start_s = min(moment_s for _, moment_s in sent.values())
    finished_s = {id: end_s for one in served.values() for id, end_s in one.finished_s.items()}
    heavy = {job.id for job in jobs if job.num_output_tokens > ForecastSettings().heavy_decode_over_tokens}
    instances = {}
    for name, one in served.items():
        own = [job for job in jobs if sent[job.id][0] == name]
        num_heavy = sum(job.id in heavy for job in own)
        instances[name] = {
            "num_heavy": num_heavy,
            "num_light": len(own) - num_heavy,
            "num_tokens": sum(job.num_output_tokens for job in own),
            "done_s": max(one.finished_s.values(), default=start_s) - start_s,
            "cpu_s": one.cpu_s,
            "block_s": one.block_s,
            "num_preemptions": one.num_preemptions,
        }
    return {
        "decode_s": max(finished_s.values()) - start_s,
        "mean_jct_s": float(np.mean([finished_s[id] - moment_s for id, (_, moment_s) in sent.items()])),
        "instances": instances,
        "requests": [
            {
                "id": job.id,
                "instance": sent[job.id][0],
                "num_output_tokens": job.num_output_tokens,
                "sent_s": round(sent[job.id][1] - start_s, 4),
                "finished_s": round(finished_s[job.id] - start_s, 4),
            }
            for job in jobs
        ],
    }


def run(is_short: bool) -> DispatchResult:
    """Measure on this machine."""
    extent, own_cores = SHORT if is_short else Extent(), cores()
    result = DispatchResult(extent=asdict(extent))
    names = [f"d{i}" for i in range(max(extent.num_instances))]
    homes = {name: own_cores[i % len(own_cores)] for i, name in enumerate(names)}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tetri-dispatch-")))
        model = make_target(TINY_OPT, scratch / TINY_OPT)
        say(f"starting {len(names)} decode instances with each size of KV pool")
        groups = {
            pool: {name: stack.enter_context(EngineProcess(_spec(model, name, homes[name], size))) for name in names}
            for pool, size in POOL_BLOCKS.items()
        }
        tables = {pool: LoadTable() for pool in groups}
        for pool, engines in groups.items():
            for name, engine in engines.items():
                stack.callback(tables[pool].listen(name, engine.call(engine_id)).close)
        for number in extent.num_instances:
            taking_part = {pool: dict(list(engines.items())[:number]) for pool, engines in groups.items()}
            for engines in taking_part.values():
                for name, engine in engines.items():
                    engine.call(run_on, [homes[name]] if number <= len(own_cores) else own_cores)
            for row in play_rounds(taking_part, tables, extent):
                result.runs.append({"num_instances": number, **row})
    return result


def play_rounds(
    groups: Mapping[str, Mapping[str, EngineProcess]], tables: Mapping[str, LoadTable], extent: Extent
) -> Iterator[Run]:
    """All systems in turn in each setting of each round, after one run per pool that is thrown away."""
    num_instances = len(groups[SETTINGS[0][1]])
    num_jobs = extent.num_requests * num_instances

    def play_one(setting: Setting, system: System, seed: int) -> Run:
        (arrivals, pool), (policy, forecasts) = setting, system
        jobs = make_jobs(num_jobs, extent.heavy_tokens, extent.window_s if arrivals == AT_RANDOM else 0.0, seed)
        dispatcher = Dispatcher(DispatchSettings(policy, seed=seed), ForecastSettings())
        return play(groups[pool], tables[pool], jobs, forecast_lengths(jobs, ACCURACY[forecasts], seed), dispatcher)

    for setting in SETTINGS[1:]:
        play_one(setting, BASE, 0)
    for number in range(extent.num_rounds):
        say(f"{num_instances} instances, round {number + 1} of {extent.num_rounds}")
        for draw, setting in product(range(extent.num_draws), SETTINGS):
            # turned round every other time, so that slow drift of the machine cancels out
            for system in SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]:
                figures = play_one(setting, system, seed=number * extent.num_draws + draw)
                yield {**dict(zip(_KEYS[1:], (*setting, *system), strict=True)), "round": number, **figures}


def _spec(model: Path, name: str, core: int, num_blocks: int) -> EngineSpec:
    settings = InstanceSettings(Role.DECODE, name, "http://offline", transfer=TransferSettings("direct"))
    return EngineSpec(
        str(model), settings, core=core, block_size_tokens=BLOCK_TOKENS, num_blocks=num_blocks, max_num_seqs=128
    )


# Figure


def draw(result: DispatchResult, path: Path) -> None:
    """Figure 19: total decode time and heavy:light on the slowest instance, one row per setting."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "tetri"}):
        figure = Figure(figsize=(9, 3 * len(SETTINGS) + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(SETTINGS), 2)
        for (left, right), setting in zip(axes, SETTINGS, strict=True):
            _draw_bars(result, left, setting, decode_s)
            _draw_bars(result, right, setting, heavy_to_light)
            arrivals, pool = setting
            left.set(title=f"Total decode time: {arrivals}, {pool} pool", ylabel="first dispatch to last token, s")
            right.set(title=f"Slowest instance: {arrivals}, {pool} pool", ylabel="(heavy + 1) / (light + 1)")
            right.axhline(1, color="#334155", linewidth=0.7, linestyle=":")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(f"Figure 19: dispatch policies, {result.extent['num_requests']} requests per decode instance")
        save_figure(figure, path)


_COLORS = {OURS: "#0f766e", PAPERS: "#7c3aed", "random": "#94a3b8", "imbalance": "#b91c1c", "least_load": "#d97706"}


def _draw_bars(result: DispatchResult, axes: Any, setting: Setting, figure: Figure) -> None:
    """Mean over the rounds per system and number of instances, whiskers from least to most."""
    numbers, width = result.extent["num_instances"], 0.8 / len(SYSTEMS)
    for i, system in enumerate(SYSTEMS):
        by_number = [result.by_round(figure, number, setting, system) for number in numbers]
        policy, forecasts = system
        places = np.arange(len(numbers)) + width * (i - (len(SYSTEMS) - 1) / 2)
        axes.bar(
            places,
            [np.mean(values) for values in by_number],
            width,
            color=_COLORS[policy],
            hatch="///" if forecasts == "oracle" else None,
            edgecolor="white",
            label=f"{policy}, {'oracle' if forecasts == 'oracle' else f'{forecasts} right'}",
        )
        lows, highs = [min(values) for values in by_number], [max(values) for values in by_number]
        axes.vlines(places, lows, highs, color="#334155", linewidth=0.8)
    axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axes.set_xlabel("decode instances")
