"""The HTML report: one self-contained page with distribution plots, the table and the facts of the run.

matplotlib is imported where it draws: nothing else needs it.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving_plugin.bench.compare import BenchResult, Ratios
from serving_plugin.bench.metrics import PAPER_RESULTS, PairedRatio, gaps_s, jct_s, ttft_s
from serving_plugin.bench.report import (
    NO_VALUE,
    SystemFigures,
    faults_of,
    milliseconds,
    seconds,
    system_figures,
    table_rows,
    workload_names,
    write_atomically,
)
from serving_plugin.core.types import Outcome, RequestRecord

_MAX_CURVE_POINTS = 400

# One colour per architecture; an untuned server is its tuned brother's colour, dashed.
_STYLES = {
    "tetriserve": ("#0f766e", "-"),
    "coupled": ("#d97706", "-"),
    "single": ("#6366f1", "-"),
    "coupled-untuned": ("#d97706", "--"),
    "single-untuned": ("#6366f1", "--"),
}
_OTHER_STYLE = ("#334155", "-")


def cdf_svg(figures: Sequence[SystemFigures], salt: str) -> str:
    """Inline SVG with the distribution functions of TTFT, ITL and JCT, a curve per system."""
    text = _draw_cdfs(figures, salt, "svg").decode("utf-8")
    return text[text.index("<svg") :]


def cdf_png(figures: Sequence[SystemFigures]) -> bytes:
    """The same plot as PNG."""
    return _draw_cdfs(figures, "png", "png")


def _draw_cdfs(figures: Sequence[SystemFigures], salt: str, kind: str) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    samples: tuple[tuple[str, Callable[[RequestRecord], list[float]]], ...] = (
        ("TTFT (s)", lambda r: [t for t in (ttft_s(r),) if t is not None]),
        ("ITL (ms)", lambda r: [1000 * gap for gap in gaps_s(r)]),
        ("JCT (s)", lambda r: [t for t in (jct_s(r),) if t is not None]),
    )
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9, "font.family": "sans-serif"}
    ):
        figure = Figure(figsize=(11, 3.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, 3, sharey=True)
        for panel, (label, sample) in zip(axes, samples, strict=True):
            for system in figures:
                values = [v for r in system.records if r.outcome is Outcome.OK for v in sample(r)]
                _draw_curve(panel, values, system)
            _style_panel(panel, label)
        axes[0].set_ylabel("share of requests (ITL: of gaps)")
        handles, labels = axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        buffer = io.BytesIO()
        # No date: the same result gives the same page.
        figure.savefig(
            buffer, format=kind, dpi=130, metadata={"Date": None, "Creator": None} if kind == "svg" else None
        )
    return buffer.getvalue()


def _draw_curve(panel: Any, values: Sequence[float], system: SystemFigures) -> None:
    if not values:
        return
    shares = np.linspace(0, 1, min(_MAX_CURVE_POINTS, max(2, len(values))))
    color, line = _STYLES.get(system.system, _OTHER_STYLE)
    width = 2.2 if system.system == "tetriserve" else 1.6
    panel.plot(np.quantile(values, shares), shares, color=color, linestyle=line, linewidth=width, label=system.title)


def _style_panel(panel: Any, label: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    panel.set_xlabel(label)
    if panel.lines:
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = panel.get_xlim()
        few_decades = high / low < 300
        panel.xaxis.set_minor_formatter(
            FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
            if few_decades
            else NullFormatter()
        )
    panel.set_ylim(0, 1.01)
    panel.axhline(0.99, color="#94a3b8", linewidth=0.7, linestyle=":")
    panel.grid(True, which="major", color="#e2e8f0", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


_CSS = """
:root{color-scheme:light;--ink:#0f172a;--soft:#64748b;--line:#e2e8f0;--accent:#0f766e}
*{box-sizing:border-box}
body{margin:0;background:#f8fafc;color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:28px;margin:0 0 4px;letter-spacing:-.02em}
h2{font-size:20px;margin:0 0 4px}
h3{font-size:15px;margin:24px 0 8px}
p{margin:4px 0 12px;max-width:90ch}
.soft{color:var(--soft)}
.fault{color:#b91c1c}
code{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}
pre{background:#f1f5f9;border-radius:8px;padding:12px;overflow-x:auto;white-space:pre-wrap}
section{background:#fff;border:1px solid var(--line);border-radius:12px;padding:24px;margin-top:24px;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 12px;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead th{border-bottom:2px solid var(--line);font-weight:600;vertical-align:bottom}
thead small{display:block;font-weight:400;color:var(--soft)}
tbody tr.first td{border-top:1px solid var(--line)}
td.best{color:var(--accent);font-weight:650}
.facts td{white-space:normal;text-align:left;vertical-align:top}
.facts td:first-child{color:var(--soft);width:170px}
svg{width:100%;height:auto;display:block;margin:16px 0 4px}
"""


def render_html(result: BenchResult) -> str:
    """The whole report as one page that needs nothing else."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>TetriServe benchmark</title>",
        f"<meta name='viewport' content='width=device-width'><style>{_CSS}</style></head><body><main>",
        "<h1>TetriServe benchmark</h1>",
        f"<p class='soft'>{_text(result.started)} · {_text(result.machine.get('processor'))}, "
        f"{_text(result.machine.get('num_cores'))} cores · model {_text(result.settings.get('model'))}</p>",
    ]
    parts += [_workload_html(result, name) for name in workload_names(result)]
    parts += [_tuning_html(result), _facts_html(result), "</main></body></html>"]
    return "\n".join(part for part in parts if part)


def _text(value: object) -> str:
    return html.escape(str(value))


def _workload_html(result: BenchResult, workload: str) -> str:
    figures = system_figures(result, workload)
    facts = [f for f in result.workloads if f["name"] == workload]
    head = "".join(f"<th>{_text(f.system)}<small>{_text(f.title)}</small></th>" for f in figures)
    rows, group = [], ""
    for row in table_rows(result, workload):
        cells = "".join(
            f"<td{' class=best' if i == row.best else ''}>{_text(value)}</td>" for i, value in enumerate(row.values)
        )
        starts = " class=first" if row.group != group else ""
        rows.append(f"<tr{starts}><td>{_text(row.group)} <span class='soft'>{_text(row.label)}</span></td>{cells}</tr>")
        group = row.group
    faults = "".join(
        f"<p class='fault'>{_text(run.system)}, seed {run.seed}: {_text(fault)}</p>"
        for run in result.runs
        if run.workload == workload
        for fault in faults_of(run)
    )
    return (
        f"<section><h2>{_text(workload.upper())}</h2><p class='soft'>{_text(_workload_line(facts))}</p>"
        f"{cdf_svg(figures, workload)}<p class='soft'>Dotted line: 99 %. Logarithmic scales.</p>"
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{faults}"
        f"{_ratios_html([r for r in result.ratios if r.workload == workload])}</section>"
    )


def _workload_line(facts: Sequence[dict[str, Any]]) -> str:
    if not facts:
        return ""
    first = facts[0]
    rate = f"Poisson at {first['rate_per_s']}/s" if first["rate_per_s"] else "all at once"
    seeds = ", ".join(str(f["seed"]) for f in facts)
    classes = ", ".join(f"{count} {name}" for name, count in first["classes"].items())
    return (
        f"{first['num_requests']} requests per repetition, {rate}, seed {seeds}; lengths from {first['length_source']} "
        f"({first['source']}); prompts of {first['prompt_tokens']['median']:g} tokens (median, up to "
        f"{first['prompt_tokens']['max']}), outputs of {first['output_tokens']['median']:g} (up to "
        f"{first['output_tokens']['max']}, {first['num_capped_outputs']} cut at {first['max_output_tokens']}); "
        f"{classes}; heavy: prompt over {first['heavy_prefill_over_tokens']}, output over "
        f"{first['heavy_decode_over_tokens']} "
        f"(the paper's thresholds times {first['scale']:g})."
    )


def _ratios_html(ratios: Sequence[Ratios]) -> str:
    if not ratios:
        return ""
    head = "".join(f"<th>vs {_text(r.theirs)}</th>" for r in ratios)
    paper = PAPER_RESULTS.get(ratios[0].workload, {})
    lines = (
        ("TTFT, mean", "mean_ttft", _change(paper.get("ttft"))),
        ("ITL, p99", "p99_itl", NO_VALUE),
        ("JCT, mean", "mean_jct", _change(paper.get("jct"))),
        ("resource time", "resource_time", _change(paper.get("resource_time"))),
        ("perf/$ (above 1: TetriServe is cheaper)", "perf_per_dollar", _paper_perf(paper)),
    )
    body = "".join(
        f"<tr><td>{label}</td>{''.join(f'<td>{_text(_paired_text(getattr(r, key), key))}</td>' for r in ratios)}"
        f"<td class='soft'>{_text(printed)}</td></tr>"
        for label, key, printed in lines
    )
    return (
        "<h3>TetriServe over the others, run by run</h3>"
        f"<table><thead><tr><th></th>{head}<th>paper, vs one vLLM</th></tr></thead><tbody>{body}</tbody></table>"
        "<p class='soft'>Ratio of means per pair of runs; in brackets the 95 % bound (bootstrap over pairs, from "
        "two pairs on; five are needed to claim anything). Paper: OPT-13B on four V100 against an untuned vLLM of "
        "January 2024, KV transfer emulated; its printed perf/$ and its resource times do not agree, so both are "
        "shown.</p>"
    )


def _paired_text(ratio: PairedRatio | None, key: str) -> str:
    """The mean with the bound that a claim must beat: a cost from above, a gain from below."""
    if ratio is None:
        return NO_VALUE
    sign, bound = ("≥", ratio.lower_95) if key == "perf_per_dollar" else ("≤", ratio.upper_95)
    note = "1 pair" if bound is None else f"{sign} {bound:.2f}, {len(ratio.ratios)} pairs"
    return f"{ratio.mean:.2f}x ({note})"


def _change(share: float | None) -> str:
    return NO_VALUE if share is None else f"{1 + share:.2f}x"


def _paper_perf(paper: dict[str, float | None]) -> str:
    return f"{paper['perf_per_dollar']}x printed, {paper['implied']}x implied" if paper else NO_VALUE


def _tuning_html(result: BenchResult) -> str:
    if not result.tuning:
        return ""
    rows = "".join(
        f"<tr><td>{step.chunk_tokens}</td><td>{seconds(step.mean_jct_s)}</td>"
        f"<td>{NO_VALUE if step.p99_itl_s is None else milliseconds(step.p99_itl_s)}</td>"
        f"<td>{step.num_errors}</td></tr>"
        for step in result.tuning
    )
    return (
        "<section><h2>Tuning of the coupled servers</h2><table><thead><tr><th>chunk (tokens)</th><th>JCT, mean</th>"
        f"<th>ITL, p99</th><th>errors</th></tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _facts_html(result: BenchResult) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    facts = {
        "machine": ", ".join(f"{key} {value}" for key, value in result.machine.items()),
        "versions": versions,
        **{key.replace("_", " "): value for key, value in result.settings.items() if value is not None},
    }
    rows = "".join(f"<tr><td>{_text(key)}</td><td>{_text(value)}</td></tr>" for key, value in facts.items())
    return (
        f"<section><h2>How this was made</h2><pre><code>{_text(result.command)}</code></pre>"
        f"<table class='facts'><tbody>{rows}</tbody></table></section>"
    )


def write_html(result: BenchResult, path: Path) -> None:
    """Write the report, whole or not at all."""
    write_atomically(path, render_html(result))
