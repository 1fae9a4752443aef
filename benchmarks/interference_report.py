"""What `interference` found: tables and plots of its rows, and what the paper says of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.engines import change_text, ratio_text
from benchmarks.record import Record, save_figure
from serving_plugin.bench.metrics import paired_ratio

LIGHT_TOKENS, HEAVY_TOKENS, CHUNK_TOKENS = 18, 512, 128
LIGHT_CONTEXT_TOKENS, HEAVY_CONTEXT_TOKENS = 32, 1024  # of decodes

COUPLED, CHUNKED, APART = "coupled", f"coupled, chunk {CHUNK_TOKENS}", "apart"
SYSTEMS = (COUPLED, CHUNKED, APART)
ALL_LIGHT, HALF_HEAVY, BALANCED, IMBALANCED = "all light", "half heavy", "balanced", "imbalanced"
_COLORS = {COUPLED: "#d97706", CHUNKED: "#6366f1", APART: "#0f766e"}

Row = dict[str, Any]

# Figure 3's queues: prompts of so many tokens, in order, all there at one moment.
QUEUES: dict[str, tuple[int, ...]] = {
    "1 light": (LIGHT_TOKENS,),
    "8 light": (LIGHT_TOKENS,) * 8,
    "64 light": (LIGHT_TOKENS,) * 64,
    "light, heavy": (LIGHT_TOKENS, HEAVY_TOKENS),
    "heavy, light": (HEAVY_TOKENS, LIGHT_TOKENS),
    "1 heavy": (HEAVY_TOKENS,),
    "7 light, heavy": (*(LIGHT_TOKENS,) * 7, HEAVY_TOKENS),
    "heavy, 7 light": (HEAVY_TOKENS, *(LIGHT_TOKENS,) * 7),
    "63 light, heavy": (*(LIGHT_TOKENS,) * 63, HEAVY_TOKENS),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A line of figure 3's table: the queues whose last and whose first prompt is the one looked at, and it alone."""

    name: str
    paper: str
    alone: str
    last: str
    first: str | None


# Source of the paper's figures, here and below: TetriInfer 2.2.
CASES = (
    Case("light with 7 light", "2x", "1 light", "8 light", "8 light"),
    Case("light with 63 light", "8x", "1 light", "64 light", "64 light"),
    Case("light with one heavy", ">10x", "1 light", "heavy, light", "light, heavy"),
    Case("heavy with 7 light", "3x", "1 heavy", "7 light, heavy", "heavy, 7 light"),
    Case("heavy with 63 light", "3x", "1 heavy", "63 light, heavy", None),
)
PAPER_DECODE_STEP = {(LIGHT_CONTEXT_TOKENS, 1): "5x"}
PAPER_LIGHT_PREFILL = "slower beyond 7 decodes"
PAPER_HEAVY_PREFILL = "up to 2.5x"
PAPER_HALF_HEAVY = {"tokens_per_s": "-16 %", "step_ms": "+23 %"}


@dataclass(slots=True, kw_only=True)
class InterferenceResult(Record):
    """Everything measured, per round; times in milliseconds. Rows are described where they are made."""

    model: str
    extent: dict[str, Any]
    prefill_prefill: list[Row] = field(default_factory=list)
    prefill_decode: list[Row] = field(default_factory=list)
    mixed: list[Row] = field(default_factory=list)
    decode_decode: list[Row] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every part brought figures."""
        return all((self.prefill_prefill, self.prefill_decode, self.mixed, self.decode_decode))

    # What a row says, per round

    def queued_ms(self, system: str, queue: str, index: int) -> list[float]:
        """Figure 3: latency of one prompt of a queue."""
        rows = (row for row in self.prefill_prefill if row["system"] == system and row["queue"] == queue)
        return [row["latency_ms"][index] for row in rows]

    def alone_ms(self, system: str, queue: str) -> list[float]:
        """What figure 3 divides by. A single light prompt is over before the engine is warm: the median of figure 4's
        newcomers beside no decode is taken for it."""
        if QUEUES[queue] == (LIGHT_TOKENS,):
            return self.beside(system, LIGHT_CONTEXT_TOKENS, 0, LIGHT_TOKENS, prefill_ms)
        return self.queued_ms(system, queue, 0)

    def beside(
        self, system: str, context: int, number: int, newcomer: int, figure: Callable[[Row], float]
    ) -> list[float]:
        """Figure 4: a figure of the rows with `number` decodes of that context and newcomers of that many tokens."""
        wanted = {
            "system": system,
            "decode_context_tokens": context,
            "num_decodes": number,
            "newcomer_tokens": newcomer,
        }
        return [figure(row) for row in self.prefill_decode if wanted.items() <= row.items()]

    def batches(self, layout: str, figure: Callable[[list[Row]], float]) -> list[float]:
        """Figure 5: a figure of the instances of `layout`."""
        rounds = sorted({row["round"] for row in self.decode_decode})
        return [
            figure([row for row in self.decode_decode if row["layout"] == layout and row["round"] == number])
            for number in rounds
        ]

    def tables(self) -> Iterator[Table]:
        """One table per figure."""
        yield self._table_of_prefills()
        yield self._table_of_decode_steps()
        yield self._table_of_newcomers()
        yield self._table_of_mixed()
        yield self._table_of_batches()
        yield self._table_of_spreading()

    def _table_of_prefills(self) -> Table:
        table = _table("Figure 3: prefill latency against alone", ("prompt", "queued"), ("paper", *SYSTEMS))
        for case in CASES:
            for place, queue, index in (("last", case.last, -1), ("first", case.first, 0)):
                if queue is not None:
                    cells = (ratio_text(self.queued_ms(s, queue, index), self.alone_ms(s, case.alone)) for s in SYSTEMS)
                    table.add_row(case.name, place, case.paper, *cells)
        return table

    def _table_of_decode_steps(self) -> Table:
        title = f"Figure 4a, b: a decode's gaps while a prompt of {HEAVY_TOKENS} comes, against the median before"
        table = _table(title, ("running", "gap"), ("paper", *SYSTEMS))
        for (context, number), (name, during) in itertools.product(self.batches_beside(), GAP_FIGURES.items()):
            pairs = [
                [self.beside(s, context, number, HEAVY_TOKENS, figure) for figure in (during, median_before)]
                for s in SYSTEMS
            ]
            paper = PAPER_DECODE_STEP.get((context, number), "-")
            table.add_row(f"{number} {kind_of(context)}", name, paper, *(ratio_text(*pair) for pair in pairs))
        return table

    def batches_beside(self) -> list[tuple[int, int]]:
        """Contexts and numbers of the decodes of figure 4."""
        found = (
            (row["decode_context_tokens"], row["num_decodes"]) for row in self.prefill_decode if row["num_decodes"]
        )
        return sorted(set(found))

    def _table_of_newcomers(self) -> Table:
        columns = ("paper", *SYSTEMS, "apart, to D's first token")
        table = _table("Figure 4c, d: prefill latency against beside no decode", ("prefill", "light decodes"), columns)
        numbers = [number for context, number in self.batches_beside() if context == LIGHT_CONTEXT_TOKENS]
        for newcomer, number in itertools.product((LIGHT_TOKENS, HEAVY_TOKENS), numbers):
            cells = []
            for system, figure in (*((system, prefill_ms) for system in SYSTEMS), (APART, first_token_ms)):
                times = self.beside(system, LIGHT_CONTEXT_TOKENS, number, newcomer, figure)
                alone = self.beside(system, LIGHT_CONTEXT_TOKENS, 0, newcomer, figure)
                cells.append(f"{ratio_text(times, alone)} {np.mean(times):.0f} ms")
            is_light = newcomer == LIGHT_TOKENS
            paper = PAPER_LIGHT_PREFILL if is_light else PAPER_HEAVY_PREFILL
            table.add_row("light" if is_light else "heavy", str(number), paper, *cells)
        return table

    def _table_of_mixed(self) -> Table:
        title = "Prompts arriving at random beside a few decodes: gaps between a decode's tokens"
        relative = ("p99/p50", "std/mean")
        columns = [f"{name}, ms" for name in SPREADS if name not in relative]
        columns += [*relative, *(f"apart's {name}" for name in relative), "newcomers' first token, ms"]
        table = _table(title, ("system",), columns)
        for system in SYSTEMS:
            of_rounds = {name: self.gap_figures(system, name) for name in SPREADS}
            means = [f"{np.mean(of_rounds[name]):.{2 if name in relative else 1}f}" for name in SPREADS]
            against = [
                "-" if system == APART else ratio_text(self.gap_figures(APART, name), of_rounds[name])
                for name in relative
            ]
            first = np.mean([ms for row in self.mixed if row["system"] == system for ms in row["first_token_ms"]])
            table.add_row(system, *means, *against, f"{first:.0f}")
        return table

    def gap_figures(self, system: str, name: str) -> list[float]:
        """The mixed run: a figure of SPREADS, by round."""
        rows = sorted((row for row in self.mixed if row["system"] == system), key=lambda row: row["round"])
        return [SPREADS[name](row["gap_ms"]) for row in rows]

    def _table_of_batches(self) -> Table:
        title = f"Figure 5: {self.extent['batch_size']} decodes on one instance (the paper: 128)"
        table = _table(title, ("batch",), ("tokens/s", "change", "paper", "step, ms", "change", "paper"))
        for layout in (ALL_LIGHT, HALF_HEAVY):
            cells = []
            for name, figure in (("tokens_per_s", tokens_per_s), ("step_ms", slowest_step_ms)):
                ours, light = self.batches(layout, figure), self.batches(ALL_LIGHT, figure)
                is_light = layout == ALL_LIGHT
                change = "-" if is_light else change_text(ours, light)
                cells += [f"{np.mean(ours):.1f}", change, "-" if is_light else PAPER_HALF_HEAVY[name]]
            table.add_row(layout, *cells)
        return table

    def _table_of_spreading(self) -> Table:
        size = self.extent["batch_size"]
        title = f"Figure 5, two instances: {size} light and {size} heavy decodes"
        columns = (
            "step of each, ms",
            "slowest step, ms",
            "std of steps, ms",
            "tokens/s while all run",
            "KV blocks of each",
            "KV max/mean",
        )
        table = _table(title, ("spread",), columns)
        figures = (slowest_step_ms, step_std_ms, tokens_per_s, kv_imbalance)
        for layout in (BALANCED, IMBALANCED):
            rows = [row for row in self.decode_decode if row["layout"] == layout]
            each = [[row for row in rows if row["instance"] == i] for i in (0, 1)]
            steps = " / ".join(f"{np.mean([ms for row in one for ms in row['step_ms']]):.1f}" for one in each)
            blocks = " / ".join(f"{np.mean([row['num_kv_blocks'] for row in one]):.0f}" for one in each)
            slowest, std, rate, kv = (f"{np.mean(self.batches(layout, figure)):.2f}" for figure in figures)
            table.add_row(layout, steps, slowest, std, rate, blocks, kv)
        pairs = [(self.batches(IMBALANCED, figure), self.batches(BALANCED, figure)) for figure in figures]
        slowest, std, rate, kv = (ratio_text(*pair) for pair in pairs)
        table.add_row("imbalanced / balanced", "", slowest, std, rate, "", kv)
        return table


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right")
    return table


# Figures of a row, or of the rows of a layout


def median_before(row: Row) -> float:
    """A decode's gap undisturbed."""
    return float(np.median(row["before_ms"]))


GAP_FIGURES: dict[str, Callable[[Row], float]] = {
    "longest": lambda row: float(np.max(row["during_ms"])),
    "mean": lambda row: float(np.mean(row["during_ms"])),
}
SPREADS: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": lambda gaps: float(np.percentile(gaps, 50)),
    "p99": lambda gaps: float(np.percentile(gaps, 99)),
    "longest": lambda gaps: float(np.max(gaps)),
    "std": lambda gaps: float(np.std(gaps)),
    "p99/p50": lambda gaps: float(np.percentile(gaps, 99) / np.percentile(gaps, 50)),
    "std/mean": lambda gaps: float(np.std(gaps) / np.mean(gaps)),
}


def prefill_ms(row: Row) -> float:
    """Median over a row's newcomers."""
    return float(np.median(row["prefill_ms"]))


def first_token_ms(row: Row) -> float:
    """Median over a row's newcomers."""
    return float(np.median(row["first_token_ms"]))


def tokens_per_s(rows: Sequence[Row]) -> float:
    """Of all instances together."""
    return float(sum(1000 * row["num_tokens"] / sum(row["step_ms"]) for row in rows))


def slowest_step_ms(rows: Sequence[Row]) -> float:
    """Mean step of the slowest instance: what the last request to end waits for."""
    return max(float(np.mean(row["step_ms"])) for row in rows)


def step_std_ms(rows: Sequence[Row]) -> float:
    """Standard deviation over the steps of all instances, each as often as tokens came from it."""
    steps = np.concatenate([row["step_ms"] for row in rows])
    weights = np.concatenate([np.full(len(row["step_ms"]), row["num_tokens"] / len(row["step_ms"])) for row in rows])
    mean = np.average(steps, weights=weights)
    return float(np.sqrt(np.average((steps - mean) ** 2, weights=weights)))


def kv_imbalance(rows: Sequence[Row]) -> float:
    """KV blocks of the fullest instance over the mean: 1 is even."""
    blocks = [row["num_kv_blocks"] for row in rows]
    return float(max(blocks) / np.mean(blocks))


def kind_of(context_tokens: int) -> str:
    """What a decode of that context is called."""
    return "light" if context_tokens == LIGHT_CONTEXT_TOKENS else "heavy"


# Plot


def draw(result: InterferenceResult, path: Path) -> None:
    """A panel per part of the figures."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    panels = (
        _draw_light,
        _draw_heavy,
        _draw_steps,
        _draw_gaps,
        _draw_light_beside,
        _draw_heavy_beside,
        _draw_batches,
        _draw_kv,
    )
    with matplotlib.rc_context({"font.size": 8, "font.family": "sans-serif"}):
        figure = Figure(figsize=(16, 7.5), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(2, 4).flat, panels, strict=True):
            panel(result, axes)
            axes.grid(True, axis="y", color="#e2e8f0", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        handles = [matplotlib.patches.Patch(color=_COLORS[system], label=system) for system in SYSTEMS]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(f"Prefill and decode requests beside each other: {result.model}, one core per instance")
        save_figure(figure, path, dpi=90)


def _mean_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    found = paired_ratio(ours, theirs)
    return float("nan") if found is None else found.mean


def _draw_queues(result: InterferenceResult, axes: Any, alone: str, title: str) -> None:
    cases = [case for case in CASES if case.alone == alone]
    for i, system in enumerate(SYSTEMS):
        base = result.alone_ms(system, alone)
        ratios = [_mean_ratio(result.queued_ms(system, case.last, -1), base) for case in cases]
        axes.bar(np.arange(len(cases)) + 0.27 * (i - 1), ratios, 0.25, color=_COLORS[system])
    axes.set_xticks(range(len(cases)), [f"{case.name}\n(paper: {case.paper})" for case in cases])
    axes.set(title=title, ylabel="latency / alone, queued last")


def _draw_light(result: InterferenceResult, axes: Any) -> None:
    _draw_queues(result, axes, "1 light", f"Figure 3: light prefill ({LIGHT_TOKENS} tokens)")


def _draw_heavy(result: InterferenceResult, axes: Any) -> None:
    _draw_queues(result, axes, "1 heavy", f"Figure 3: heavy prefill ({HEAVY_TOKENS} tokens)")


def _draw_steps(result: InterferenceResult, axes: Any) -> None:
    batches = result.batches_beside()
    for i, system in enumerate(SYSTEMS):
        pairs = [
            [result.beside(system, *batch, HEAVY_TOKENS, figure) for figure in (GAP_FIGURES["longest"], median_before)]
            for batch in batches
        ]
        axes.bar(
            np.arange(len(batches)) + 0.27 * (i - 1),
            [_mean_ratio(*pair) for pair in pairs],
            0.25,
            color=_COLORS[system],
        )
    axes.axhline(1, color="#334155", linewidth=0.7, linestyle=":")
    axes.set_xticks(range(len(batches)), [f"{number}\n{kind_of(context)}" for context, number in batches])
    axes.set(
        title="Figure 4a, b: a heavy prefill joins (paper: 5x)", xlabel="running decodes", yscale="log",
        ylabel="longest gap / median before",
    )  # fmt: skip


def _draw_gaps(result: InterferenceResult, axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    for system in SYSTEMS:
        gaps = [ms for row in result.mixed if row["system"] == system for ms in row["gap_ms"]]
        shares = np.linspace(0, 1, 400)
        if gaps:
            axes.plot(np.quantile(gaps, shares), shares, color=_COLORS[system])
    axes.axhline(0.99, color="#94a3b8", linewidth=0.7, linestyle=":")
    axes.set(
        title="Prompts at random beside decodes", xlabel="gap between tokens, ms", ylabel="share of gaps", xscale="log"
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda ms, _: f"{ms:g}" if f"{ms:e}"[0] in "25" else ""))


def _draw_beside(result: InterferenceResult, axes: Any, newcomer: int, title: str) -> None:
    numbers = [0, *(number for context, number in result.batches_beside() if context == LIGHT_CONTEXT_TOKENS)]
    for system in SYSTEMS:
        times = [result.beside(system, LIGHT_CONTEXT_TOKENS, number, newcomer, prefill_ms) for number in numbers]
        axes.plot(numbers, [_mean_ratio(ms, times[0]) for ms in times], color=_COLORS[system], marker="o", markersize=4)
    at_client = [result.beside(APART, LIGHT_CONTEXT_TOKENS, number, newcomer, first_token_ms) for number in numbers]
    ratios = [_mean_ratio(ms, at_client[0]) for ms in at_client]
    axes.plot(numbers, ratios, color=_COLORS[APART], linestyle="--", label="apart, to D's first token")
    axes.legend(frameon=False)
    axes.set_xticks(numbers)
    axes.set(title=title, xlabel="running light decodes", ylabel="prefill latency / beside none")
    axes.set_ylim(bottom=0)


def _draw_light_beside(result: InterferenceResult, axes: Any) -> None:
    _draw_beside(result, axes, LIGHT_TOKENS, f"Figure 4c: light prefill (paper: {PAPER_LIGHT_PREFILL})")


def _draw_heavy_beside(result: InterferenceResult, axes: Any) -> None:
    _draw_beside(result, axes, HEAVY_TOKENS, f"Figure 4d: heavy prefill (paper: {PAPER_HEAVY_PREFILL})")


def _draw_batches(result: InterferenceResult, axes: Any) -> None:
    figures = {"tokens/s": tokens_per_s, "step": slowest_step_ms}
    ratios = [
        _mean_ratio(result.batches(HALF_HEAVY, figure), result.batches(ALL_LIGHT, figure))
        for figure in figures.values()
    ]
    axes.bar(range(2), ratios, 0.5, color=_COLORS[APART])
    axes.axhline(1, color="#334155", linewidth=0.7, linestyle=":")
    axes.set_xticks(
        range(2), [f"{name}\n(paper: {paper})" for name, paper in zip(figures, PAPER_HALF_HEAVY.values(), strict=True)]
    )
    axes.set(title=f"Figure 5: {result.extent['batch_size']} decodes, half of them heavy", ylabel="against all light")


def _draw_kv(result: InterferenceResult, axes: Any) -> None:
    for i, layout in enumerate((BALANCED, IMBALANCED)):
        for instance, color in enumerate(("#0f766e", "#94a3b8")):
            rows = [row for row in result.decode_decode if row["layout"] == layout and row["instance"] == instance]
            steps = [ms for row in rows for ms in row["step_ms"]]
            share = np.mean([row["num_kv_blocks"] / row["num_total_blocks"] for row in rows])
            label = f"instance {instance + 1}" if i == 0 else None
            place = i + 0.4 * (instance - 0.5)
            bar = axes.bar(place, np.mean(steps), 0.36, yerr=np.std(steps), color=color, capsize=3, label=label)
            axes.bar_label(bar, [f"KV {share:.0%}"], padding=3)
    axes.set_xticks(range(2), [BALANCED, IMBALANCED])
    axes.set(title="Figure 5: two instances, mean and std of a step", ylabel="decode step, ms")
    axes.margins(y=0.15)
    axes.legend(frameon=False)
