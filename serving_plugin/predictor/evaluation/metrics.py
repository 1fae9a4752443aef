"""How good predictors are: `evaluate.Metric` classes, and the function that scores a split for several at once.

Heavy (imports `evaluate`, hence datasets): imported by training, evaluation and `tetri evaluate`, never by a server.
Classes of ours, since `evaluate.load` fetches its scripts from a hub. They state each metric for one set of rows;
`resampled` computes the same for all bootstrap draws at once, and tests hold the two together.

Conventions: a reply that was cut counts in the bucket of the cut, forecasts clipped there (`scores.Truth`); a length
beyond the last edge counts in the last bucket; the predicted bucket is the argmax, the point estimate in tokens the
median, the ranking score the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from serving_plugin.core.forecast import HEAVY_DECODE_OVER_TOKENS
from serving_plugin.predictor.evaluation import resampled
from serving_plugin.predictor.evaluation.bootstrap import Interval
from serving_plugin.predictor.evaluation.resampled import Resamples
from serving_plugin.predictor.evaluation.scores import Array, FloatArray, Forecasts, Truth, bucket_of, row_scores
from serving_plugin.predictor.rows import LabelledRow
from serving_plugin.predictor.spec import PredictorSpec

GRANULARITIES_TOKENS = (100, 200, 400)
DEFAULT_COVERAGE = 0.9
MODAL, MARGINAL, OWN_MODAL = "modal", "marginal", "own_modal"  # known without a baselines file
_HIGHER_IS_BETTER = ("accuracy_", "within_one_", "macro_f1_", "kendall_tau", "auroc_", "coverage_judged")
_NEAR_TO_NOMINAL = ("coverage", "interval_coverage")

Numbers = Sequence[float] | Array

_CITATION = "TetriInfer, arXiv 2401.11181, section 5.2.2 (accuracy); the other metrics are common in the field."


def _info(description: str, kind: str) -> evaluate.MetricInfo:
    features = datasets.Features({"predictions": datasets.Value(kind), "references": datasets.Value(kind)})
    return evaluate.MetricInfo(description=description, citation=_CITATION, features=features)


class BucketAccuracy(evaluate.Metric):  # type: ignore[misc]  # evaluate ships no types
    """Share of rows whose predicted bucket index is the true one."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("Share of exactly hit buckets.", "int64")

    def _compute(self, predictions: Numbers, references: Numbers) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


class MeanAbsoluteErrorTokens(evaluate.Metric):  # type: ignore[misc]
    """Mean absolute error of a length in tokens."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("Mean absolute error in tokens.", "float64")

    def _compute(self, predictions: Numbers, references: Numbers) -> dict[str, float]:
        return {"mae_tokens": float(np.mean(np.abs(np.asarray(predictions) - np.asarray(references))))}


class KendallTau(evaluate.Metric):  # type: ignore[misc]
    """Rank correlation tau-b between predicted and true lengths; NaN when either is constant."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("Kendall's tau-b.", "float64")

    def _compute(self, predictions: Numbers, references: Numbers) -> dict[str, float]:
        from scipy.stats import kendalltau

        return {"kendall_tau": float(kendalltau(predictions, references).statistic)}


class HeavyDecodeAuroc(evaluate.Metric):  # type: ignore[misc]
    """Area under the ROC curve of a score for heavy decodes (references 0 or 1); NaN when only one class occurs."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("AUROC of heavy against light decode.", "float64")

    def _compute(self, predictions: Numbers, references: Numbers) -> dict[str, float]:
        from sklearn.metrics import roc_auc_score

        heavy = np.asarray(references) > 0.5
        one_class = bool(heavy.all() or not heavy.any())
        return {"auroc_heavy": math.nan if one_class else float(roc_auc_score(heavy, predictions))}


def modal_bucket(spec: PredictorSpec, granularity_tokens: int, cap_tokens: int | None = None) -> int:
    """The training split's most frequent bucket: what a predictor has to beat. Lengths are cut at `cap_tokens`."""
    prior = Forecasts.from_weights(spec.edges_tokens, np.asarray([spec.train_counts])).clipped(cap_tokens)
    return int(prior.regrouped(granularity_tokens).argmax())


def score_split(
    spec: PredictorSpec,
    probabilities: Array,
    rows: Sequence[LabelledRow],
    *,
    baselines: Mapping[str, Array] | None = None,
    granularities_tokens: Sequence[int] = GRANULARITIES_TOKENS,
    heavy_over_tokens: int = HEAVY_DECODE_OVER_TOKENS,
    coverage: float = DEFAULT_COVERAGE,
    num_resamples: int = 200,
    seed: int = 0,
    own_modal: bool = False,
) -> dict[str, Any]:
    """All metrics of a split for the predictor and everything it is compared with, on the same rows.

    The predictor's metrics are flat: `name`, with `name_low` and `name_high` the 95 % bounds (bootstrap by
    conversation). `baselines` maps a name to its metrics and to `gain`: metric -> value, low, high of how much better
    the predictor is (positive: better, whatever the metric's direction; for coverage: nearer to what was asked).
    What the rows cannot define is None. See `scores.row_scores` and `resampled` for each metric.

    Args:
        probabilities: (rows, fine buckets) over `spec.edges_tokens`.
        baselines: name -> (rows, fine buckets) of other predictors; `modal` and `marginal` come from the spec's counts
            and are there in any case.
        coverage: level of the quantile that memory would be reserved by.
        num_resamples: bootstrap draws; 0: no bounds.
        own_modal: also compare with the bucket that is most frequent in these very rows, known in hindsight: the
            stronger rival where training saw replies of another source.
    """
    truth = Truth.of(rows)
    widths = sorted({*granularities_tokens, spec.granularity_tokens})
    resamples = Resamples(truth.roots, num_resamples, seed)
    everyone = np.broadcast_to(np.asarray(spec.train_counts), (len(rows), spec.num_buckets))

    def draws_of(weights: Array) -> dict[str, FloatArray]:
        forecasts = truth.forecasts(spec.edges_tokens, weights)
        return _draws(forecasts, truth, resamples, widths, spec.granularity_tokens, coverage, heavy_over_tokens)

    ours = draws_of(probabilities)
    rivals = {MODAL: _constant_draws(spec, truth, resamples, widths, in_hindsight=False)}
    if own_modal:
        rivals[OWN_MODAL] = _constant_draws(spec, truth, resamples, widths, in_hindsight=True)
    rivals |= {name: draws_of(weights) for name, weights in {MARGINAL: everyone, **(baselines or {})}.items()}
    report: dict[str, Any] = {
        "num_rows": len(rows),
        "num_conversations": len(set(truth.roots)),
        "num_censored": truth.num_censored,
        "num_cut_early": truth.num_cut_early,
        "cap_tokens": truth.cap_tokens,
        "cap_rate": round(truth.num_censored / len(rows), 4),
        "coverage_nominal": coverage,
    }
    for name, draws in ours.items():
        report |= _flat(name, resampled.interval(draws))
    for width in widths:
        modal = rivals[MODAL][f"accuracy_{width}"]
        report |= _flat(f"modal_accuracy_{width}", resampled.interval(modal))
        report |= _flat(f"gain_over_modal_{width}", resampled.interval(ours[f"accuracy_{width}"] - modal))
    report |= _flat("prior_median_mae_tokens", resampled.interval(rivals[MARGINAL]["mae_tokens"]))
    report["baselines"] = {name: _compared(ours, draws, coverage) for name, draws in rivals.items()}
    return report


def _draws(
    forecasts: Forecasts,
    truth: Truth,
    resamples: Resamples,
    widths: Sequence[int],
    published_tokens: int,
    coverage: float,
    heavy_over_tokens: int,
) -> dict[str, FloatArray]:
    """Metric -> (draws,); fewer for the rank correlation."""
    lengths = truth.lengths_tokens
    by_row = row_scores(forecasts, lengths, widths, coverage, truth.cap_tokens)
    averaged = resampled.means(resamples, np.column_stack(list(by_row.values())))
    draws: dict[str, FloatArray] = {name: averaged[:, i] for i, name in enumerate(by_row)}
    judged = draws["coverage_judged"]
    draws["coverage"] = np.divide(draws["coverage"], judged, out=np.full_like(judged, math.nan), where=judged > 0)
    for width in widths:
        coarse = forecasts.regrouped(width)
        actual = bucket_of(lengths, width, coarse.shape[1])
        draws[f"macro_f1_{width}"] = resampled.macro_f1(resamples, coarse.argmax(axis=1), actual)
    confidence = forecasts.regrouped(published_tokens).max(axis=1)
    draws["median_error_tokens"] = resampled.median(resamples, by_row["mae_tokens"])
    draws["ece"] = resampled.expected_calibration_error(resamples, confidence, by_row[f"accuracy_{published_tokens}"])
    draws["over_reserved_at_coverage_tokens"] = resampled.over_reserved_at_coverage(
        resamples, forecasts, lengths, coverage
    )
    draws["kendall_tau"] = resampled.kendall_tau(resamples, forecasts.means(), lengths)
    over = forecasts.probability_over(heavy_over_tokens)
    draws["auroc_heavy"] = resampled.auroc(resamples, over, lengths > heavy_over_tokens)
    return draws


def _constant_draws(
    spec: PredictorSpec, truth: Truth, resamples: Resamples, widths: Sequence[int], *, in_hindsight: bool
) -> dict[str, FloatArray]:
    """Always the modal bucket, of the training split or of these rows: one at each width and nothing finer."""
    num_tokens = spec.edges_tokens[-1] if truth.cap_tokens is None else min(spec.edges_tokens[-1], truth.cap_tokens + 1)
    draws: dict[str, FloatArray] = {}
    for width in widths:
        actual = bucket_of(truth.lengths_tokens, width, -(-num_tokens // width))
        bucket = int(np.bincount(actual).argmax()) if in_hindsight else modal_bucket(spec, width, truth.cap_tokens)
        named = np.full(len(actual), bucket)
        averaged = resampled.means(resamples, np.column_stack([named == actual, np.abs(named - actual) <= 1]))
        draws[f"accuracy_{width}"], draws[f"within_one_{width}"] = averaged.T
        draws[f"macro_f1_{width}"] = resampled.macro_f1(resamples, named, actual)
    return draws


def _compared(ours: Mapping[str, FloatArray], theirs: Mapping[str, FloatArray], coverage: float) -> dict[str, Any]:
    gains = {}
    for name, draws in theirs.items():
        mine = ours[name]
        if name in _NEAR_TO_NOMINAL:
            gain = np.abs(draws - coverage) - np.abs(mine - coverage)
        else:
            gain = mine - draws if name.startswith(_HIGHER_IS_BETTER) else draws - mine
        gains[name] = resampled.interval(gain).to_plain()
    return {**{name: finite(float(draws[0])) for name, draws in theirs.items()}, "gain": gains}


def _flat(name: str, interval: Interval) -> dict[str, float | None]:
    bounds = (("", interval.value), ("_low", interval.low), ("_high", interval.high))
    return {f"{name}{suffix}": finite(number) for suffix, number in bounds}


def finite(value: float) -> float | None:
    """For JSON: four decimals, None for NaN."""
    return None if math.isnan(value) else round(value, 4)
