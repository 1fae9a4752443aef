"""What a reader sees of a `BenchResult`: one terminal table and one JSON file; `report_html` makes the page.

Latencies are pooled over the repetitions of a system; resource time and makespan are means over them. Files are
written whole or not at all.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serving_plugin.bench.compare import BenchResult, RunResult
from serving_plugin.bench.metrics import (
    PAPER_RESULTS,
    Distribution,
    PairedRatio,
    RunMetrics,
    measure,
)
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import Outcome, RequestRecord

if TYPE_CHECKING:
    from rich.table import Table

NO_VALUE = "–"


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """All repetitions of one workload on one system, put together."""

    system: str
    title: str
    num_runs: int
    pooled: RunMetrics
    resource_time_s: float | None
    makespan_s: float | None
    peak_resident_bytes: int | None
    records: tuple[RequestRecord, ...]


def system_figures(result: BenchResult, workload: str) -> list[SystemFigures]:
    """Figures of every system that ran `workload`, in order of first appearance."""
    runs = [run for run in result.runs if run.workload == workload]
    return [_pool([run for run in runs if run.system == name]) for name in dict.fromkeys(run.system for run in runs)]


def _pool(runs: Sequence[RunResult]) -> SystemFigures:
    records = tuple(record for run in runs for record in run.records)
    peaks = [run.peak_resident_bytes for run in runs if run.peak_resident_bytes is not None]
    return SystemFigures(
        system=runs[0].system,
        title=runs[0].title,
        num_runs=len(runs),
        pooled=measure(records),
        resource_time_s=_mean_or_none(run.metrics.resource_time_s for run in runs),
        makespan_s=_mean_or_none(run.metrics.makespan_s for run in runs),
        peak_resident_bytes=max(peaks) if peaks else None,
        records=records,
    )


def _mean_or_none(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return sum(v for v in known if v is not None) / len(known) if known and None not in known else None


def workload_names(result: BenchResult) -> list[str]:
    """Workloads in the order in which they were run first."""
    return list(dict.fromkeys(run.workload for run in result.runs))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a value per system. `group` starts a block of lines."""

    group: str
    label: str
    values: tuple[str, ...]
    best: int | None = None


def table_rows(result: BenchResult, workload: str) -> list[Row]:
    """Rows of one workload's table, the best system of each line marked. Shared by terminal and HTML."""
    figures = system_figures(result, workload)
    rows: list[Row] = []

    def add(
        group: str, label: str, value: Callable[[SystemFigures], float | None], text: Callable[[float], str]
    ) -> None:
        values = [value(f) for f in figures]
        known = [v for v in values if v is not None]
        best = values.index(min(known)) if len(known) > 1 and min(known) < max(known) else None
        rows.append(Row(group, label, tuple(NO_VALUE if v is None else text(v) for v in values), best))

    for group, of, text in (
        ("TTFT", lambda f: f.pooled.ttft_s, seconds),
        ("ITL", lambda f: f.pooled.itl_s, milliseconds),
        ("token 1→2", lambda f: f.pooled.first_gap_s, milliseconds),
        ("JCT", lambda f: f.pooled.jct_s, seconds),
    ):
        for label in ("mean", "p50", "p99"):
            add(group, label, _percentile_of(of, label), text)
    add("resource time", "", lambda f: f.resource_time_s, seconds)
    if any(ratios.workload == workload for ratios in result.ratios):
        rows.append(_perf_row(result, workload, figures))
    add("makespan", "", lambda f: f.makespan_s, seconds)
    tokens = [_ratio_text(f.pooled.output_tokens_per_s if f.num_runs == 1 else _tokens_per_s(f)) for f in figures]
    rows.append(Row("output tokens/s", "", tuple(tokens)))
    rows.append(Row("finished / sent", "", tuple(f"{f.pooled.num_ok} / {f.pooled.num_requests}" for f in figures)))
    if any(f.peak_resident_bytes is not None for f in figures):
        rows.append(Row("peak memory", "", tuple(gibibytes(f.peak_resident_bytes) for f in figures)))
    return rows


def _percentile_of(
    of: Callable[[SystemFigures], Distribution | None], label: str
) -> Callable[[SystemFigures], float | None]:
    def value(figures: SystemFigures) -> float | None:
        distribution = of(figures)
        return None if distribution is None else float(getattr(distribution, label))

    return value


def _tokens_per_s(figures: SystemFigures) -> float | None:
    if not figures.makespan_s:
        return None
    return figures.pooled.num_output_tokens / figures.num_runs / figures.makespan_s


def _ratio_text(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.0f}"


def _perf_row(result: BenchResult, workload: str, figures: Sequence[SystemFigures]) -> Row:
    """perf/$ of TetriServe against each other system: their resource time over ours."""
    gains = {r.theirs: r.perf_per_dollar for r in result.ratios if r.workload == workload}
    values = []
    for f in figures:
        gain = gains.get(f.system)
        values.append("1.00 (reference)" if f.system == "tetriserve" else _gain_text(gain))
    return Row("perf/$ of TetriServe vs", "", tuple(values))


def _gain_text(gain: PairedRatio | None) -> str:
    return NO_VALUE if gain is None else f"{gain.mean:.2f}x"


def seconds(value: float) -> str:
    """`1.23 s`"""
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def milliseconds(value: float) -> str:
    """`45 ms`"""
    return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"


def gibibytes(value: int | None) -> str:
    """`4.2 GiB`"""
    return NO_VALUE if value is None else f"{value / 2**30:.1f} GiB"


def render_table(result: BenchResult) -> Table:
    """One terminal table, a section per workload, a column per system; the best of each line in bold."""
    from rich.table import Table

    names = list(dict.fromkeys(run.system for run in result.runs))
    titles = {run.system: run.title for run in result.runs}
    table = Table(title="TetriServe benchmark", caption=caption(result), caption_justify="left", header_style="bold")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(f"{name}\n[dim]{titles[name]}[/dim]", justify="right")
    for workload in workload_names(result):
        if len(workload_names(result)) > 1:
            table.add_section()
            table.add_row(f"[bold cyan]{workload.upper()}[/bold cyan]")
        present = [f.system for f in system_figures(result, workload)]
        group = ""
        for row in table_rows(result, workload):
            cells = dict(zip(present, row.values, strict=True))
            best = present[row.best] if row.best is not None else None
            values = [f"[bold green]{cells[n]}[/bold green]" if n == best else cells.get(n, NO_VALUE) for n in names]
            if row.group != group and (row.label or group in ("JCT",)):
                table.add_section()
            label = f"{row.group} {row.label}".strip()
            table.add_row(label, *values)
            group = row.group
    return table


def caption(result: BenchResult) -> str:
    """Notes without which the figures may be misread."""
    notes = ["resource time: seconds with work, summed over instances (means over repetitions)."]
    for ratios in result.ratios:
        paper = PAPER_RESULTS.get(ratios.workload)
        if paper is not None and ratios.theirs == "single":
            notes.append(
                f"{ratios.workload}: the paper (OPT-13B, 4 V100, untuned vLLM of 2024) prints perf/$ "
                f"{paper['perf_per_dollar']}x; its own resource times imply {paper['implied']}x."
            )
    faults = [f"{run.system}: {fault}" for run in result.runs for fault in faults_of(run)]
    return "\n".join(notes + faults[:5])


def faults_of(run: RunResult) -> list[str]:
    """One line about the failed requests of a run, if there are any."""
    failed = [r for r in run.records if r.outcome is not Outcome.OK]
    return [f"{len(failed)} of {len(run.records)} requests failed, first: {failed[0].error}"] if failed else []


def write_json(result: BenchResult, path: Path) -> None:
    """Write every raw figure, whole or not at all."""
    write_atomically(path, json.dumps(result.to_json(), allow_nan=False) + "\n")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` with `content`, text as UTF-8. Raises `ConfigurationError` when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                Path(file.name).chmod(0o644)
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); give another path") from None
