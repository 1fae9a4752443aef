"""The page of `tetri evaluate --report`: one self-contained HTML file, light and dark, without a request to anywhere.

Sections: how good against what (with intervals), reliability, coverage against width, errors by prompt length and by
role in the conversation, confusion. Prompts are quoted nowhere; every text is escaped all the same.
"""

from __future__ import annotations

import contextlib
import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.evaluation import plots, summary, tables
from serving_plugin.predictor.evaluation.scores import Array, Forecasts, Truth
from serving_plugin.predictor.evaluation.summary import Column, Table
from serving_plugin.predictor.evaluation.tables import GroupErrors
from serving_plugin.predictor.rows import LabelledRow
from serving_plugin.predictor.spec import PredictorSpec

_MAX_CURVES = 4  # more lines than this in one plot cannot be told apart


@dataclass(frozen=True, slots=True)
class Evaluated:
    """All that the page shows.

    Args:
        spec: of the predictor, its calibration included.
        probabilities: (rows, fine buckets) calibrated.
        baselines: name -> (rows, fine buckets), as they went into `report`.
        report: of `metrics.score_split` on these rows.
        oracle: of `ceiling.resample_oracle`; None when no reply has two samples.
        facts: what is said of model and data at the top and bottom.
        notes: what a reader has to know, such as missing baselines.
    """

    spec: PredictorSpec
    probabilities: Array
    rows: Sequence[LabelledRow]
    report: Mapping[str, Any]
    baselines: Mapping[str, Array] = field(default_factory=dict)
    oracle: Mapping[str, Any] | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()
    num_resamples: int = 200


_CSS = """
:root{color-scheme:light dark;--ink:#0f172a;--soft:#526077;--line:#d5dce6;--page:#f8fafc;--card:#fff;
--accent:#0f766e;--bad:#b91c1c}
@media(prefers-color-scheme:dark){:root{--ink:#e5e9f0;--soft:#a3aebf;--line:#3b4557;--page:#0f141c;--card:#171e29;
--accent:#2dd4bf;--bad:#f87171}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:28px;margin:0 0 4px;letter-spacing:-.02em}
h2{font-size:20px;margin:0 0 8px}
p{margin:4px 0 12px;max-width:95ch}
.soft{color:var(--soft)}
.note{color:var(--bad)}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:24px;margin-top:24px}
.wide{overflow-x:auto}
.wide:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;margin:8px 0 16px}
caption{text-align:left;color:var(--soft);padding-bottom:6px}
th,td{padding:6px 10px;text-align:right;white-space:nowrap}
thead th{border-bottom:2px solid var(--line);vertical-align:bottom;white-space:normal}
th[scope=row]{text-align:left;font-weight:400;padding-left:0}
tr.ours th,tr.ours td{font-weight:650}
td.sure{color:var(--accent);font-weight:650}
td.worse{color:var(--bad)}
td.cell{background:color-mix(in srgb,var(--accent) calc(var(--share)*60%),transparent);text-align:center}
figure{margin:0}
svg{width:100%;height:auto;display:block;max-width:1120px}
.facts td{text-align:left;white-space:normal}
"""


def render_html(evaluated: Evaluated) -> str:
    """The whole page."""
    report, spec = evaluated.report, evaluated.spec
    truth = Truth.of(evaluated.rows)
    forecasts = truth.forecasts(spec.edges_tokens, evaluated.probabilities)
    notes = "".join(f"<p class='note'>{_text(note)}</p>" for note in evaluated.notes)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>TetriServe length predictor</title>",
        f"<meta name='viewport' content='width=device-width'><style>{_CSS}</style></head><body><main>",
        f"<h1>Length predictor</h1><p class='soft'>{_text(_headline(evaluated))}</p>{notes}",
        _scores_html(evaluated),
        _pictures_html(evaluated, forecasts, truth),
        _groups_html(evaluated, forecasts, truth),
        _confusion_html(forecasts, truth, spec.granularity_tokens),
        _facts_html({**evaluated.facts, **_facts_of(report, spec)}),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def write_report(evaluated: Evaluated, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        ConfigurationError: `path` cannot be written.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; give another --report")
    text = render_html(evaluated)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); give another --report") from None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def _text(value: object) -> str:
    return html.escape(str(value))


def _headline(evaluated: Evaluated) -> str:
    report, spec = evaluated.report, evaluated.spec
    model = evaluated.facts.get("model", "predictor")
    version = evaluated.facts.get("version")
    return (
        f"{model}{f' version {version}' if version else ''} · forecasts the output length of {spec.target_model} · "
        f"{report['num_rows']} replies of {report['num_conversations']} conversations"
    )


def _scores_html(evaluated: Evaluated) -> str:
    report, columns = evaluated.report, summary.columns_of(evaluated.report)
    scores = _table_html(
        summary.score_table(report, evaluated.oracle),
        "Scores. In brackets 95 % intervals (bootstrap by conversation).",
        row_classes=["ours"],
    )
    gains = _table_html(
        summary.gain_table(report),
        "What the predictor adds to each: above zero is better in every column. Coloured where the interval excludes "
        "zero.",
        cell_classes=[
            [_certainty(entry["gain"], column) for column in columns] for entry in report["baselines"].values()
        ],
    )
    ceiling = (
        ""
        if evaluated.oracle is None
        else f"<p class='soft'>The ceiling takes one sample of a reply as the forecast of another: "
        f"{evaluated.oracle['num_samples']} samples of {evaluated.oracle['num_replies']} replies, a part of the rows "
        "above; the predictor's own figures on these samples stand below it.</p>"
    )
    return (
        f"<section><h2>How good, against what</h2><p>{_text(_sentence(evaluated))}</p>{scores}{ceiling}{gains}"
        "<p class='soft'>Accuracy: the likeliest bucket of that many tokens is the true one. MAE: of the median, in "
        "tokens. CRPS: of the whole distribution, in tokens, lower is better. ECE: mean gap between the probability of "
        "the likeliest bucket and how often it came. Over-reserved: how far the upper quantile lies above the length, "
        "every model at the level where it covers just what was asked.</p></section>"
    )


def _sentence(evaluated: Evaluated) -> str:
    words = summary.verdict(evaluated.report, evaluated.spec.granularity_tokens)
    return f"{words[0].upper()}{words[1:]}."


def _certainty(gains: Mapping[str, Any], column: Column) -> str:
    gain = gains.get(column.metric)
    if gain is None or gain["low"] is None:
        return ""
    return "sure" if gain["low"] > 0 else "worse" if gain["high"] < 0 else ""


def _pictures_html(evaluated: Evaluated, forecasts: Forecasts, truth: Truth) -> str:
    spec = evaluated.spec
    bins = tables.reliability(forecasts, truth, spec.granularity_tokens)
    points = tables.coverage_curve(forecasts, truth)
    curves = {summary.PREDICTOR: points}
    for name, weights in _curve_baselines(evaluated).items():
        curves[summary.title_of(name)] = tables.coverage_curve(truth.forecasts(spec.edges_tokens, weights), truth)
    pictures = plots.svg(
        "calibration",
        "Reliability diagram, coverage of quantiles, over-reserved tokens against coverage; numbers follow as tables",
        plots.draw_reliability(bins, spec.granularity_tokens),
        plots.draw_coverage(points),
        plots.draw_cost_of_coverage(curves),
    )
    reliability = Table(
        ("probability", "rows", "mean probability", "came"),
        tuple(
            (f"{one.low:.1f} to {one.high:.1f}", str(one.num_rows), f"{one.confidence:.3f}", f"{one.accuracy:.3f}")
            for one in bins
        ),
    )
    coverage = Table(
        ("level", "covered", "over-reserved tokens"),
        tuple((f"{100 * p.level:g} %", f"{100 * p.coverage:.1f} %", f"{p.over_reserved_tokens:.1f}") for p in points),
    )
    return (
        f"<section><h2>Do the probabilities mean what they say?</h2><figure>{pictures}</figure>"
        f"<details><summary>Numbers</summary>{_table_html(reliability, 'Reliability of the likeliest bucket')}"
        f"{_table_html(coverage, 'Coverage and width of one-sided quantiles')}</details></section>"
    )


def _curve_baselines(evaluated: Evaluated) -> dict[str, Array]:
    """The baselines that come nearest by CRPS: a plot holds few lines."""
    scores = evaluated.report["baselines"]
    near = sorted(evaluated.baselines, key=lambda name: scores[name]["crps_tokens"])[:_MAX_CURVES]
    return {name: evaluated.baselines[name] for name in evaluated.baselines if name in near}


def _groups_html(evaluated: Evaluated, forecasts: Forecasts, truth: Truth) -> str:
    from serving_plugin.predictor.evaluation.metrics import modal_bucket

    spec, width = evaluated.spec, evaluated.spec.granularity_tokens
    parts = []
    for heading, first, groups in (
        ("Error by prompt length", "characters", tables.by_prompt_length(evaluated.rows)),
        ("Error by role in the conversation", "the reply is", tables.by_role(evaluated.rows)),
    ):
        errors = tables.group_errors(
            groups, forecasts, truth, modal_bucket(spec, width, truth.cap_tokens), width,
            coverage=evaluated.report["coverage_nominal"], num_resamples=evaluated.num_resamples,
        )  # fmt: skip
        parts.append(f"<section><h2>{heading}</h2>{_table_html(_group_table(first, errors, width), '')}</section>")
    return "".join(parts)


def _group_table(first: str, errors: Sequence[GroupErrors], width: int) -> Table:
    share, tokens = Column("", "", True), Column("tokens", "")
    rows = tuple(
        (
            one.label,
            str(one.num_rows),
            f"{share.show(one.accuracy.value)} {share.show_interval(*_bounds(one.accuracy))}".rstrip(),
            share.show(one.modal_accuracy),
            f"{tokens.show(one.mae_tokens.value)} {tokens.show_interval(*_bounds(one.mae_tokens))}".rstrip(),
            f"{one.bias_tokens:+.1f}",
            share.show(one.coverage),
        )
        for one in errors
    )
    columns = (first, "rows", f"accuracy at {width}", "modal bucket", "MAE, tokens", "bias, tokens", "covered")
    return Table(columns, rows)


def _bounds(interval: Any) -> tuple[float | None, float | None]:
    plain = interval.to_plain()
    return plain["low"], plain["high"]


def _confusion_html(forecasts: Forecasts, truth: Truth, width: int) -> str:
    counts = tables.confusion(forecasts, truth, width)
    names = [f"{i * width} to {(i + 1) * width - 1}" for i in range(len(counts))]
    body = []
    for name, row in zip(names, counts, strict=True):
        total = max(1, int(row.sum()))
        cells = "".join(
            f"<td class='cell' style='--share:{count / total:.3f}'>{count}<br><span class='soft'>{count / total:.0%}"
            "</span></td>"
            for count in row.tolist()
        )
        body.append(f"<tr><th scope='row'>{name}</th>{cells}<td>{int(row.sum())}</td></tr>")
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    return (
        f"<section><h2>Confusion at {width} tokens</h2><div class='wide' tabindex='0'><table><caption>Rows: the bucket "
        f"that came; columns: the likeliest one. Shares are of the row.</caption><thead><tr><th scope='col'>came</th>"
        f"{head}<th scope='col'>rows</th></tr></thead><tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _facts_of(report: Mapping[str, Any], spec: PredictorSpec) -> dict[str, object]:
    return {
        "target": spec.target_model,
        "trained on": f"{spec.source} replies, {sum(spec.train_counts)} rows",
        "backbone": spec.backbone,
        "replies": report["num_rows"],
        "conversations": report["num_conversations"],
        "cut replies": summary.cut_replies(report),
    }


def _facts_html(facts: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{_text(name)}</th><td>{_text(value)}</td></tr>"
        for name, value in facts.items()
        if value not in (None, "")
    )
    return f"<section><h2>What was evaluated</h2><table class='facts'><tbody>{rows}</tbody></table></section>"


def _table_html(
    table: Table, caption: str, *, row_classes: Sequence[str] = (), cell_classes: Sequence[Sequence[str]] = ()
) -> str:
    head = "".join(f"<th scope='col'>{_text(column)}</th>" for column in table.columns)
    body = []
    for i, (first, *cells) in enumerate(table.rows):
        classes = cell_classes[i] if i < len(cell_classes) else [""] * len(cells)
        row = f" class='{row_classes[i]}'" if i < len(row_classes) else ""
        filled = "".join(
            f"<td{f' class={name}' if name else ''}>{_text(cell)}</td>"
            for cell, name in zip(cells, classes, strict=True)
        )
        body.append(f"<tr{row}><th scope='row'>{_text(first)}</th>{filled}</tr>")
    described = f"<caption>{_text(caption)}</caption>" if caption else ""
    return (
        f"<div class='wide' tabindex='0'><table>{described}<thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
