"""`prefill_order`: in which order and portions prompts that wait together are prefilled (TetriInfer figure 16).

ShareGPT prompts, all there at one moment, on one engine on one core; each round draws others:
  fixed batch of 16   vLLM's own scheduler, 16 whole prompts in a step, first come first served (the paper's baseline)
  FCFS, SJF, LJF n    our prefill instance, chunks of 128 tokens, rounds of `sched_batch` n

Latency (with one token asked for: TTFT) is from `add` to the first token, waiting from `add` to the first step that
computes some of the prompt. All there at once, every order takes the same time in all: what differs is who waits.

The paper's vLLM (January 2024) padded the prompts of a batch to the longest; today's does not. What that would cost is
computed, not measured: the measured time per token, times the padded batches' tokens.

`--short` shows that it works and measures nothing worth quoting.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.engines import change_text, cores, in_turn, rounded
from benchmarks.record import Record, deliver, save_figure, say
from pipeline.target import load_tokenizer
from serving_plugin.bench import workloads
from serving_plugin.bench.workloads import WorkloadName, WorkloadSpec, make_workload, read_pairs
from serving_plugin.core.config import ChunkSettings, InstanceSettings, OrderSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.order import ORDER_POLICIES, QueuedPrompt, next_round
from serving_plugin.core.types import Role
from serving_plugin.engine.offline_process import EngineProcess, EngineSpec

CHUNK_TOKENS = 128
FIXED_BATCH = 16
RUN_TIMEOUT_S = 600.0
NUM_ORDERINGS = 200

__all__ = ["deliver", "draw", "run"]

Row = dict[str, Any]

_serial = itertools.count()  # ids never repeat, or a scheduler would take a prompt for one of an earlier round


@dataclass(frozen=True, slots=True)
class System:
    """A way to prefill. `order` None: vLLM's own scheduler with a fixed batch."""

    name: str
    order: OrderSettings | None

    @property
    def settings(self) -> InstanceSettings | None:
        """Of a prefill instance."""
        if self.order is None:
            return None
        chunk = ChunkSettings("fixed", CHUNK_TOKENS)
        return InstanceSettings(Role.PREFILL, "p", "http://offline", order=self.order, chunk=chunk)


FIXED = System(f"fixed batch of {FIXED_BATCH}", None)
FCFS, SJF, LJF = (System(f"{policy.upper()} 16", OrderSettings(policy, 16)) for policy in ("fcfs", "sjf", "ljf"))
WIDER = tuple(System(f"SJF {n}", OrderSettings("sjf", n)) for n in (32, 64, 128))
SYSTEMS = (FIXED, FCFS, SJF, LJF, *WIDER)
_COLORS = ("#d97706", "#64748b", "#0f766e", "#8b5cf6", "#14b8a6", "#2563eb", "#65a30d")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    num_prompts: int = 128
    max_prompt_tokens: int = 1024
    num_rounds: int = 5


SHORT = Extent(num_prompts=24, max_prompt_tokens=64, num_rounds=1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of one system against another's; `paper`: what TetriInfer figure 16 says of it."""

    what: str
    figure: str
    ours: System
    theirs: System
    paper: str


COMPARISONS = (
    Comparison("chunked FCFS against the fixed batch", "latency", FCFS, FIXED, "-86.4 %"),
    Comparison("SJF against FCFS, sched_batch 16", "waiting", SJF, FCFS, "-7.8 %"),
    Comparison("SJF, sched_batch 128 against 16", "latency", WIDER[-1], SJF, "-46.5 %"),
    Comparison("LJF against FCFS, sched_batch 16", "latency", LJF, FCFS, "worse"),
    Comparison("SJF 128 against the fixed batch", "latency", WIDER[-1], FIXED, "-"),
    Comparison("SJF 128 against the fixed batch", "p99 latency", WIDER[-1], FIXED, "-"),
    Comparison("SJF 128 against the fixed batch", "total", WIDER[-1], FIXED, "-"),
)
PADDED = "chunked FCFS against that batch padded, computed"
PAPER_ORDERING = "10s to 100s of µs"
FIGURES: dict[str, Callable[[Row], float]] = {
    "latency": lambda row: float(np.mean(row["latency_ms"])),
    "p50 latency": lambda row: float(np.percentile(row["latency_ms"], 50)),
    "p99 latency": lambda row: float(np.percentile(row["latency_ms"], 99)),
    "waiting": lambda row: float(np.mean(row["waiting_ms"])),
    "total": lambda row: float(row["total_ms"]),
}


@dataclass(slots=True, kw_only=True)
class PrefillOrderResult(Record):
    """Everything measured. `prompts_tokens`: lengths in the order of arrival, a list per round; `rows`: a run each, in
    that order; `ordering_us`: to form one round while all prompts wait, by system."""

    model: str
    source: str
    extent: dict[str, Any]
    prompts_tokens: list[list[int]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    ordering_us: dict[str, float] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether anything was measured."""
        return bool(self.rows)

    def figures(self, system: System, figure: str) -> list[float]:
        """A figure of a system's runs, by round."""
        rows = sorted((row for row in self.rows if row["system"] == system.name), key=lambda row: row["round"])
        return [FIGURES[figure](row) for row in rows]

    def tables(self) -> Iterator[Table]:
        """What each system gives, and the paper's claims."""
        lengths = np.concatenate(self.prompts_tokens)
        facts = f"median {np.median(lengths):.0f}, mean {lengths.mean():.0f}, longest {lengths.max()} tokens"
        table = Table(title=f"{self.extent['num_prompts']} prompts at once ({facts})")
        for column in (
            "system",
            *(f"{figure}, s" for figure in FIGURES),
            "scheduler per step, µs",
            "ordering a round, µs",
        ):
            table.add_column(column, justify="left" if column == "system" else "right")
        for system in SYSTEMS:
            means = [np.mean(self.figures(system, figure)) / 1000 for figure in FIGURES]
            steps = [us for row in self.rows if row["system"] == system.name for us in row["scheduler_us"]]
            ordering = f"{self.ordering_us[system.name]:.0f}" if system.name in self.ordering_us else "-"
            table.add_row(system.name, *(f"{mean:.2f}" for mean in means), f"{np.median(steps):.0f}", ordering)
        yield table
        table = Table(title=f"Against the paper (its ordering takes {PAPER_ORDERING})")
        for column in ("comparison", "figure", "paper", "here"):
            table.add_column(column, justify="left" if column in ("comparison", "figure") else "right")
        for one in COMPARISONS:
            change = change_text(self.figures(one.ours, one.figure), self.figures(one.theirs, one.figure))
            table.add_row(one.what, one.figure, one.paper, change)
        padded = [
            padded_latency_ms(lengths, total_ms)
            for lengths, total_ms in zip(self.prompts_tokens, self.figures(FIXED, "total"), strict=True)
        ]
        table.add_row(PADDED, "latency", "-86.4 %", change_text(self.figures(FCFS, "latency"), padded))
        yield table


def run(model: Path, source: str, is_short: bool) -> PrefillOrderResult:
    """Measure on this machine."""
    extent = SHORT if is_short else Extent()
    context = extent.max_prompt_tokens + 2  # a workload's requests have two output tokens at least
    if workloads.model_context_tokens(model) < context:
        raise ConfigurationError(f"model {model} has a context below the {context} tokens that this benchmark needs")
    say("drawing prompts")
    pairs, counter, tokenizer = read_pairs(source), workloads.load_tokenizer(model), load_tokenizer(str(model))
    result = PrefillOrderResult(model=model.name, source=source, extent=asdict(extent))
    drawn = []
    for seed in range(extent.num_rounds):
        spec = WorkloadSpec(WorkloadName.MIXED, extent.num_prompts, seed, context, max_output_tokens=2)
        workload = make_workload(spec, pairs, counter, source)
        drawn.append([list(tokenizer(request.prompt)["input_ids"]) for request in workload.requests])
    result.prompts_tokens = [[len(prompt) for prompt in prompts] for prompts in drawn]
    result.ordering_us = {system.name: ordering_us(system.order, drawn[0]) for system in SYSTEMS if system.order}
    here = cores()[0]
    with ExitStack() as stack:
        say("starting two engines")

        def start(settings: InstanceSettings | None, num_seqs: int, num_batched_tokens: int) -> EngineProcess:
            spec = EngineSpec(
                str(model), settings, here, max_num_seqs=num_seqs, max_num_batched_tokens=num_batched_tokens,
                max_model_len_tokens=context,
            )  # fmt: skip
            return stack.enter_context(EngineProcess(spec))

        stock = start(None, FIXED_BATCH, FIXED_BATCH * extent.max_prompt_tokens)
        ours = start(FCFS.settings, extent.num_prompts, max(context, CHUNK_TOKENS))
        for engine in (stock, ours):
            engine.wait_until_ready()
        say("warming them")
        for system in (FIXED, SJF):
            (ours if system.order else stock).call(prefill_all, drawn[0][: 2 * FIXED_BATCH], system.settings)
        for number, prompts in enumerate(drawn):
            for name in in_turn([system.name for system in SYSTEMS], number):
                system = next(system for system in SYSTEMS if system.name == name)
                say(f"round {number + 1} of {extent.num_rounds}: {name}")
                row = (ours if system.order else stock).call(prefill_all, prompts, system.settings)
                result.rows.append({"system": name, "round": number, **row})
    return result


def prefill_all(engine: Any, prompts: Sequence[Sequence[int]], settings: InstanceSettings | None) -> Row:
    """Inside an engine's process: all prompts at once, until each has its token. The first step's scheduler time is
    left out: it holds the queueing."""
    engine.forget()
    if settings is not None:
        engine.configure(settings)
    queued = [engine.add(f"prompt-{next(_serial)}", prompt, 1) for prompt in prompts]
    engine.run(RUN_TIMEOUT_S)
    return {
        "latency_ms": rounded([1000 * (one.token_times_s[0] - one.added_s) for one in queued]),
        "waiting_ms": rounded([1000 * (one.first_scheduled_s - one.added_s) for one in queued]),
        "total_ms": round(1000 * (max(one.token_times_s[0] for one in queued) - queued[0].added_s), 3),
        "scheduler_us": rounded([1e6 * step.scheduler_s for step in engine.steps[1:]]),
    }


def ordering_us(order: OrderSettings, prompts: Sequence[Sequence[int]]) -> float:
    """Median microseconds to form a round while all `prompts` wait."""
    queue = [QueuedPrompt(str(i), 0.0, len(prompt)) for i, prompt in enumerate(prompts)]
    times_s = []
    for _ in range(NUM_ORDERINGS):
        start_s = time.perf_counter()
        next_round(queue, (), ORDER_POLICIES[order.policy], order.sched_batch)
        times_s.append(time.perf_counter() - start_s)
    return float(1e6 * np.median(times_s))


def padded_latency_ms(lengths: Sequence[int], total_ms: float) -> float:
    """Mean latency of fixed batches padded to their longest prompts, at the time per token of unpadded ones, which took
    `total_ms` in all."""
    batches = [lengths[i : i + FIXED_BATCH] for i in range(0, len(lengths), FIXED_BATCH)]
    done_tokens = np.cumsum([len(batch) * max(batch) for batch in batches])
    mean_tokens = np.average(done_tokens, weights=[len(batch) for batch in batches])
    return float(mean_tokens * total_ms / sum(lengths))


def draw(result: PrefillOrderResult, path: Path) -> None:
    """Latency and waiting by system, and the distribution of latency."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    with matplotlib.rc_context({"font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        bars, curves = figure.subplots(1, 2)
        places = np.arange(len(SYSTEMS))
        for name, shift, color in (("latency", -0.2, "#0f766e"), ("waiting", 0.2, "#94a3b8")):
            runs = [np.asarray(result.figures(system, name)) / 1000 for system in SYSTEMS]
            bars.bar(
                places + shift, [run.mean() for run in runs], 0.38, yerr=[run.std() for run in runs], color=color,
                label=f"{name}, mean (bar: std over rounds)", capsize=2,
            )  # fmt: skip
        bars.set_xticks(places, [system.name.replace(" of ", "\nof ") for system in SYSTEMS])
        bars.set(title="Mean over the prompts", ylabel="seconds")
        bars.margins(y=0.25)  # room for the legend
        for system, color in zip(SYSTEMS, _COLORS, strict=True):
            times = [ms / 1000 for row in result.rows if row["system"] == system.name for ms in row["latency_ms"]]
            shares = np.linspace(0, 1, 200)
            curves.plot(np.quantile(times, shares), shares, color=color, label=system.name)
        curves.set(title="Distribution of latency", xlabel="seconds from add to first token", ylabel="share of prompts")
        for axes in (bars, curves):
            axes.grid(True, color="#e2e8f0", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8)
        extent = result.extent
        figure.suptitle(f"Figure 16: {extent['num_prompts']} ShareGPT prompts at once, {result.model}, one core")
        save_figure(figure, path, dpi=100)
