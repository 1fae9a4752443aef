"""Stage evaluate: the exported model, as served, on the test split and the target's own replies, beside baselines.

Writes `metrics/evaluate.json` and `metrics/headlines.json`, the plots accuracy.csv, confusion.csv, reliability.csv,
reliability.png, coverage.csv, coverage.png and predicted_lengths.png, and
`models/predictor/evaluation/test_predictions.npz`, from which the registration gate compares row by row.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.baselines import PREDICTIONS as BASELINE_PREDICTIONS
from pipeline.export import EXPORT
from pipeline.files import progress, run_stage, write_bytes, write_json, write_text
from pipeline.label import TARGET_REPLIES_FILE
from pipeline.params import Params, load_params
from pipeline.tracking import load_run_id, tracked_run
from pipeline.train import CHECKPOINT, LABELLED, MAX_THREADS
from serving_plugin.predictor.evaluation import plots, summary, tables
from serving_plugin.predictor.evaluation.baselines import read_baselines, write_arrays
from serving_plugin.predictor.evaluation.ceiling import resample_oracle
from serving_plugin.predictor.evaluation.metrics import MARGINAL, score_split
from serving_plugin.predictor.evaluation.scores import Array, Forecasts, Truth, bucket_of
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import default_tracking_uri
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import PredictorSpec

BATCH_SIZE = 32
HEADLINES_NAME = "headlines.json"
# What `dvc metrics show` and `diff` compare; evaluate.json holds everything.
HEADLINES = (
    "accuracy_100", "accuracy_200", "accuracy_400", "modal_accuracy_200", "gain_over_modal_200",
    "gain_over_modal_200_low", "gain_over_modal_200_high", "kendall_tau", "auroc_heavy", "mae_tokens", "crps_tokens",
    "nll", "ece", "coverage", "over_reserved_tokens", "target_accuracy_200", "target_modal_accuracy_200",
    "target_kendall_tau", "target_auroc_heavy", "target_coverage",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the stage writes: a metrics file (its headlines beside it), a folder of plots, and the test rows' scores."""

    metrics: Path = Path("metrics/evaluate.json")
    plots: Path = Path("plots")
    predictions: Path = Path("models/predictor/evaluation/test_predictions.npz")


def evaluate(
    params: Params,
    labelled: Path,
    folder: Path,
    baselines: Path | None,
    outputs: Outputs,
    run_id: str,
    tracking_uri: str,
) -> dict[str, Any]:
    """Score the predictor in `folder`; returns what `outputs.metrics` holds.

    `baselines` is the file of stage baselines; None compares with the modal bucket and the marginal distribution only.
    On the target's own replies every key begins with `target_`.

    Raises:
        ConfigurationError: a file is missing, or the baselines were made for other data.
    """
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    loaded = LengthPredictor.load(str(folder), num_threads=num_threads, batch_size=BATCH_SIZE)
    rows = read_rows(labelled / "test.jsonl")
    progress(f"evaluate: {len(rows)} replies of the test split")
    probabilities = loaded.conversation_probabilities(rows)
    rivals = {} if baselines is None else read_baselines(baselines, [row.id for row in rows], loaded.spec.edges_tokens)
    report = score(params, loaded.spec, probabilities, rows, rivals)
    report["source"] = loaded.spec.source
    oracle = ceiling(params, loaded.spec, probabilities, rows)
    progress_table(report, oracle, loaded.spec.granularity_tokens, "test split")
    if oracle is not None:
        report["oracle"] = oracle
    report |= score_target_replies(params, loaded, labelled / TARGET_REPLIES_FILE, baselines)
    write_json(outputs.metrics, report)
    write_json(outputs.metrics.with_name(HEADLINES_NAME), {name: report[name] for name in HEADLINES if name in report})
    truth = Truth.of(rows)
    forecasts = truth.forecasts(loaded.spec.edges_tokens, probabilities)
    write_plots(outputs.plots, report, loaded.spec, forecasts, truth, rivals)
    write_arrays(outputs.predictions, row_predictions(forecasts, truth, loaded.spec.granularity_tokens))
    _log(report, run_id, tracking_uri)
    return report


def score(
    params: Params,
    spec: PredictorSpec,
    probabilities: Array,
    rows: Sequence[LabelledRow],
    baselines: Mapping[str, Array],
    *,
    own_modal: bool = False,
) -> dict[str, Any]:
    """`metrics.score_split` with the settings of `evaluate.*`."""
    settings = params.evaluate
    return score_split(
        spec,
        probabilities,
        rows,
        baselines=baselines,
        granularities_tokens=settings.granularities_tokens,
        heavy_over_tokens=settings.heavy_over_tokens,
        coverage=settings.coverage,
        num_resamples=settings.num_bootstrap,
        seed=params.seed,
        own_modal=own_modal,
    )


def ceiling(
    params: Params, spec: PredictorSpec, probabilities: Array, rows: Sequence[LabelledRow]
) -> dict[str, Any] | None:
    """The noise ceiling of these rows and the predictor beside it; None without repeated replies."""
    settings = params.evaluate
    return resample_oracle(
        rows,
        granularities_tokens=sorted({*settings.granularities_tokens, params.label.granularity_tokens}),
        num_resamples=settings.num_bootstrap,
        seed=params.seed,
        predictor=(spec, probabilities),
    )


def score_target_replies(params: Params, loaded: LengthPredictor, path: Path, baselines: Path | None) -> dict[str, Any]:
    """The same table on the target's own replies as `target_...`, with their noise ceiling; {} without such rows.

    A predictor of recorded replies has never seen one of them. `own_modal` is their own modal bucket, in hindsight.
    """
    rows = read_rows(path) if path.is_file() and path.stat().st_size else []
    if not rows:
        return {}
    spec = loaded.spec
    progress(f"evaluate: {len(rows)} replies of {spec.target_model}")
    rivals = {} if baselines is None else read_baselines(baselines, [row.id for row in rows], spec.edges_tokens)
    probabilities = loaded.conversation_probabilities(rows)
    report = score(params, spec, probabilities, rows, rivals, own_modal=True)
    oracle = ceiling(params, spec, probabilities, rows)
    progress_table(report, oracle, spec.granularity_tokens, f"replies of {spec.target_model}")
    if oracle is not None:
        report["oracle"] = oracle
    return {f"target_{name}": value for name, value in report.items()}


def progress_table(
    report: Mapping[str, Any], oracle: Mapping[str, Any] | None, granularity_tokens: int, title: str
) -> None:
    """Scores and gains with their intervals, line by line."""
    for heading, table in (
        (f"{title}, [95 % intervals by conversation]", summary.score_table(report, oracle)),
        (f"{title}, what the predictor adds (above zero is better)", summary.gain_table(report)),
    ):
        for line in (f"evaluate: {heading}", *table.lines()):
            progress(line)
    progress(f"evaluate: {title}, cut replies: {summary.cut_replies(report)}")
    progress(f"evaluate: {title}: {summary.verdict(report, granularity_tokens)}")


def row_predictions(forecasts: Forecasts, truth: Truth, granularity_tokens: int) -> dict[str, Array]:
    """The arrays of test_predictions.npz, (rows,) each: what a later model is compared with, row by row."""
    coarse, lengths = forecasts.regrouped(granularity_tokens), truth.lengths_tokens
    hits = coarse.argmax(axis=1) == bucket_of(lengths, granularity_tokens, coarse.shape[1])
    return {
        "ids": np.asarray(truth.ids),
        "roots": np.asarray(truth.roots),
        "lengths_tokens": lengths,
        f"hit_{granularity_tokens}": hits,
        "crps_tokens": forecasts.crps_tokens(lengths).astype(np.float32),
    }


def write_plots(
    folder: Path,
    report: Mapping[str, Any],
    spec: PredictorSpec,
    forecasts: Forecasts,
    truth: Truth,
    baselines: Mapping[str, Array],
) -> None:
    """Every plot of the test split."""
    width = spec.granularity_tokens
    bins = tables.reliability(forecasts, truth, width)
    everyone = np.broadcast_to(np.asarray(spec.train_counts), (len(truth.ids), spec.num_buckets))
    curves = {summary.PREDICTOR: tables.coverage_curve(forecasts, truth)}
    for name, weights in {MARGINAL: everyone, **baselines}.items():
        curves[summary.title_of(name)] = tables.coverage_curve(truth.forecasts(spec.edges_tokens, weights), truth)
    write_text(folder / "accuracy.csv", accuracy_table(report))
    write_text(folder / "confusion.csv", confusion_table(forecasts, truth, width))
    write_text(
        folder / "reliability.csv",
        _csv(
            ("probability_low", "probability_high", "num_rows", "probability", "came"),
            [(b.low, b.high, b.num_rows, f"{b.confidence:.4f}", f"{b.accuracy:.4f}") for b in bins],
        ),
    )
    write_text(
        folder / "coverage.csv",
        _csv(
            ("model", "level", "covered", "over_reserved_tokens"),
            [
                (model, point.level, f"{point.coverage:.4f}", f"{point.over_reserved_tokens:.1f}")
                for model, points in curves.items()
                for point in points
            ],
        ),
    )
    pictures = {
        "reliability.png": [plots.draw_reliability(bins, width)],
        "coverage.png": [plots.draw_coverage(curves[summary.PREDICTOR]), plots.draw_cost_of_coverage(curves)],
        "predicted_lengths.png": [plots.draw_lengths(truth.lengths_tokens, forecasts.means())],
    }
    for name, panels in pictures.items():
        write_bytes(folder / name, plots.png(*panels))


def accuracy_table(report: Mapping[str, Any]) -> str:
    """CSV: granularity, model, accuracy; of everything that was compared."""
    lines = []
    for width in summary.widths_of(report):
        lines.append((width, summary.PREDICTOR, report[f"accuracy_{width}"]))
        for name, scores in report["baselines"].items():
            lines.append((width, summary.title_of(name), scores[f"accuracy_{width}"]))
    return _csv(("granularity_tokens", "model", "accuracy"), lines)


def confusion_table(forecasts: Forecasts, truth: Truth, granularity_tokens: int) -> str:
    """CSV: one line per test row, actual and predicted bucket."""
    coarse = forecasts.regrouped(granularity_tokens)
    actual = bucket_of(truth.lengths_tokens, granularity_tokens, coarse.shape[1])
    ends = [(i * granularity_tokens, (i + 1) * granularity_tokens) for i in range(coarse.shape[1])]
    names = [f"{low:05d}-{high:05d}" for low, high in ends]  # zeros: DVC sorts as text
    lines = [(names[a], names[p]) for a, p in zip(actual, coarse.argmax(axis=1), strict=True)]
    return _csv(("actual", "predicted"), lines)


def _csv(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def _log(report: Mapping[str, Any], run_id: str, tracking_uri: str) -> None:
    with tracked_run(tracking_uri, run_id):
        import mlflow

        mlflow.log_metrics(
            {f"test.{name}": float(value) for name, value in report.items() if isinstance(value, int | float)}
        )


def main() -> None:
    """Entry point."""
    evaluate(
        load_params(),
        LABELLED,
        EXPORT,
        BASELINE_PREDICTIONS,
        Outputs(),
        load_run_id(CHECKPOINT),
        default_tracking_uri(),
    )


if __name__ == "__main__":
    run_stage(main)
