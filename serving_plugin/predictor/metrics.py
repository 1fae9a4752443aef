"""How good a predictor is: `evaluate.Metric` classes and the one function that scores a split with them.

Heavy (imports `evaluate`, hence datasets): imported by training, evaluation and `tetri evaluate`, never by a server.
Classes of ours, since `evaluate.load` fetches its scripts from a hub.

Conventions: a censored reply counts at the length where it was cut; a length beyond the last edge counts in the last
bucket; the predicted bucket is the argmax, the point estimate in tokens the median, the ranking score the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
import numpy.typing as npt

from serving_plugin.core.forecast import HEAVY_DECODE_OVER_TOKENS, LengthForecast
from serving_plugin.predictor.rows import LabelledRow
from serving_plugin.predictor.spec import PredictorSpec

GRANULARITIES_TOKENS = (100, 200, 400)
Array = npt.NDArray[Any]
Score = Callable[[Array], float]

_CITATION = "TetriInfer, arXiv 2401.11181, section 5.2.2 (accuracy); the other metrics are common in the field."


def _info(description: str, kind: str) -> evaluate.MetricInfo:
    features = datasets.Features({"predictions": datasets.Value(kind), "references": datasets.Value(kind)})
    return evaluate.MetricInfo(description=description, citation=_CITATION, features=features)


class BucketAccuracy(evaluate.Metric):  # type: ignore[misc]  # evaluate ships no types
    """Share of rows whose predicted bucket index is the true one."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("Share of exactly hit buckets.", "int64")

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


class MeanAbsoluteErrorTokens(evaluate.Metric):  # type: ignore[misc]
    """Mean absolute error of a length in tokens."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("Mean absolute error in tokens.", "float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"mae_tokens": float(np.mean(np.abs(np.asarray(predictions) - np.asarray(references))))}


class KendallTau(evaluate.Metric):  # type: ignore[misc]
    """Rank correlation tau-b between predicted and true lengths; NaN when either is constant."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("Kendall's tau-b.", "float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        from scipy.stats import kendalltau

        return {"kendall_tau": float(kendalltau(predictions, references).statistic)}


class HeavyDecodeAuroc(evaluate.Metric):  # type: ignore[misc]
    """Area under the ROC curve of a score for heavy decodes (references 0 or 1); NaN when only one class occurs."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("AUROC of heavy against light decode.", "float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        from sklearn.metrics import roc_auc_score

        heavy = np.asarray(references) > 0.5
        one_class = bool(heavy.all() or not heavy.any())
        return {"auroc_heavy": math.nan if one_class else float(roc_auc_score(heavy, predictions))}


def bucket_of(lengths_tokens: Array, width_tokens: int, num_buckets: int) -> Array:
    """Index of each length's bucket `[i * width, (i + 1) * width)`, at most the last."""
    buckets: Array = np.minimum(np.asarray(lengths_tokens) // width_tokens, num_buckets - 1)
    return buckets


def regroup(edges_tokens: Sequence[int], probabilities: Array, granularity_tokens: int) -> Array:
    """(rows, fine buckets) summed to (rows, buckets of `granularity_tokens`), as `LengthForecast.regrouped` does."""
    unit = np.eye(len(edges_tokens) - 1)
    shares = [
        LengthForecast(tuple(edges_tokens), tuple(row)).regrouped(granularity_tokens).probabilities for row in unit
    ]
    coarse: Array = np.asarray(probabilities, dtype=np.float64) @ np.asarray(shares)
    return coarse


def score_split(
    spec: PredictorSpec,
    probabilities: Array,
    rows: Sequence[LabelledRow],
    *,
    granularities_tokens: Sequence[int] = GRANULARITIES_TOKENS,
    heavy_over_tokens: int = HEAVY_DECODE_OVER_TOKENS,
    num_resamples: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """All metrics of a split beside the modal bucket's, flat; `_low`/`_high` bound 95 % (bootstrap by conversation).

    Args:
        probabilities: (rows, fine buckets) of the predictor.
        num_resamples: bootstrap resamples; 0 leaves the intervals out.

    A metric that the split cannot define (one class only, constant lengths) is None.
    """
    lengths = np.asarray([row.output_tokens for row in rows])
    scores = _scores(spec, probabilities, lengths, granularities_tokens, heavy_over_tokens)
    everything = np.arange(len(rows))
    values = {name: score(everything) for name, score in scores.items()}
    report: dict[str, Any] = {
        "num_rows": len(rows),
        "num_censored": sum(row.censored for row in rows),
        "num_train_rows": sum(spec.train_counts),
    }
    intervals = _intervals(scores, [row.root_id for row in rows], num_resamples, seed)
    for name, value in values.items():
        report[name] = _finite(value)
        if name in intervals:
            report[f"{name}_low"], report[f"{name}_high"] = (_finite(bound) for bound in intervals[name])
    return report


def _scores(
    spec: PredictorSpec, probabilities: Array, lengths: Array, granularities: Sequence[int], heavy_over_tokens: int
) -> dict[str, Score]:
    """Every metric as a function of the chosen row indices (the bootstrap chooses some twice)."""
    accuracy, mae, tau, auroc = BucketAccuracy(), MeanAbsoluteErrorTokens(), KendallTau(), HeavyDecodeAuroc()
    scores: dict[str, Score] = {}
    for width in granularities:
        coarse = regroup(spec.edges_tokens, probabilities, width)
        truth = bucket_of(lengths, width, coarse.shape[1])
        hits = _on_rows(accuracy, coarse.argmax(axis=1), truth)
        modal_hits = _on_rows(accuracy, np.full(len(lengths), modal_bucket(spec, width)), truth)
        scores[f"accuracy_{width}"] = hits
        scores[f"modal_accuracy_{width}"] = modal_hits
        scores[f"gain_over_modal_{width}"] = lambda chosen, a=hits, b=modal_hits: a(chosen) - b(chosen)  # type: ignore[misc]
    forecasts = [LengthForecast.from_weights(spec.edges_tokens, row.tolist()) for row in probabilities]
    medians = np.asarray([forecast.quantile(0.5) for forecast in forecasts], dtype=np.float64)
    prior_median = LengthForecast.from_weights(spec.edges_tokens, spec.train_counts).quantile(0.5)
    means = np.asarray([forecast.mean_tokens() for forecast in forecasts])
    over = np.asarray([forecast.probability_over(heavy_over_tokens) for forecast in forecasts])
    scores["mae_tokens"] = _on_rows(mae, medians, lengths)
    scores["prior_median_mae_tokens"] = _on_rows(mae, np.full(len(lengths), prior_median), lengths)
    scores["kendall_tau"] = _on_rows(tau, means, lengths)
    scores["auroc_heavy"] = _on_rows(auroc, over, lengths > heavy_over_tokens)
    return scores


def modal_bucket(spec: PredictorSpec, granularity_tokens: int) -> int:
    """The training split's most frequent bucket: what a predictor has to beat."""
    return int(regroup(spec.edges_tokens, np.asarray([spec.train_counts]), granularity_tokens).argmax())


def _on_rows(metric: evaluate.Metric, predictions: Array, references: Array) -> Score:
    # `_compute` and not `compute`: the latter writes every resample to an Arrow table first
    return lambda chosen: next(iter(metric._compute(predictions[chosen], references[chosen]).values()))


def _intervals(
    scores: dict[str, Score], root_ids: Sequence[str], num_resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals; whole conversations are drawn, since their turns are alike."""
    if num_resamples < 1:
        return {}
    rng = np.random.default_rng(seed)
    roots, member = np.unique(np.asarray(root_ids), return_inverse=True)
    members = [np.flatnonzero(member == i) for i in range(len(roots))]
    draws: dict[str, list[float]] = {name: [] for name in scores}
    for _ in range(num_resamples):
        chosen = np.concatenate([members[i] for i in rng.integers(0, len(roots), len(roots))])
        for name, score in scores.items():
            draws[name].append(score(chosen))
    return {name: _percentiles(values) for name, values in draws.items()}


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    defined = [value for value in values if not math.isnan(value)]
    if not defined:
        return math.nan, math.nan
    low, high = np.percentile(defined, [2.5, 97.5])
    return float(low), float(high)


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
