"""The numbers of an evaluation's plots and tables: reliability, coverage, confusion, errors by group. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving_plugin.predictor.evaluation import resampled
from serving_plugin.predictor.evaluation.bootstrap import Interval
from serving_plugin.predictor.evaluation.resampled import NUM_BINS, Resamples
from serving_plugin.predictor.evaluation.scores import Array, Forecasts, Truth, bucket_of, row_scores, share_covered
from serving_plugin.predictor.rows import LabelledRow

COVERAGE_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_PROMPT_CHARS = (50, 150, 500, 2000)
_EARLIER_REPLIES = (1, 2, 3, 5, 10)


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Rows whose likeliest bucket has a probability in `[low, high)`: their mean probability and how often it came."""

    low: float
    high: float
    num_rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class CoveragePoint:
    """Coverage of the quantile of `level`, see `scores.share_covered`; mean tokens by which it is above the length."""

    level: float
    coverage: float
    over_reserved_tokens: float


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """One group of rows. Accuracy and coverage are shares; MAE is that of the median, in tokens.

    `bias_tokens` is mean forecast minus mean length: positive where the predictor expects too much. `coverage`: see
    `scores.share_covered`.
    """

    label: str
    num_rows: int
    accuracy: Interval
    modal_accuracy: float
    mae_tokens: Interval
    bias_tokens: float
    coverage: float | None


def reliability(forecasts: Forecasts, truth: Truth, granularity_tokens: int) -> list[ReliabilityBin]:
    """Tenths of confidence that hold rows, at one granularity."""
    coarse = forecasts.regrouped(granularity_tokens)
    confidence = coarse.max(axis=1)
    hit = coarse.argmax(axis=1) == bucket_of(truth.lengths_tokens, granularity_tokens, coarse.shape[1])
    member = resampled.confidence_bin(confidence)
    return [
        ReliabilityBin(
            low=index / NUM_BINS,
            high=(index + 1) / NUM_BINS,
            num_rows=int((member == index).sum()),
            confidence=float(confidence[member == index].mean()),
            accuracy=float(hit[member == index].mean()),
        )
        for index in np.unique(member).tolist()
    ]


def coverage_curve(
    forecasts: Forecasts, truth: Truth, levels: Sequence[float] = COVERAGE_LEVELS
) -> list[CoveragePoint]:
    """How one-sided quantiles cover and what they cost, at each level that has a quantile below the cap."""
    points = []
    for level in levels:
        upper = forecasts.quantiles(level)
        covered = share_covered(truth.lengths_tokens, upper, truth.cap_tokens)
        if covered is not None:
            points.append(CoveragePoint(level, covered, float(np.maximum(upper - truth.lengths_tokens, 0).mean())))
    return points


def confusion(forecasts: Forecasts, truth: Truth, granularity_tokens: int) -> Array:
    """(actual, predicted) counts of rows, square."""
    coarse = forecasts.regrouped(granularity_tokens)
    counts = np.zeros((coarse.shape[1], coarse.shape[1]), dtype=np.int64)
    np.add.at(counts, (bucket_of(truth.lengths_tokens, granularity_tokens, coarse.shape[1]), coarse.argmax(axis=1)), 1)
    return counts


def by_prompt_length(rows: Sequence[LabelledRow]) -> list[tuple[str, Array]]:
    """Label and (rows,) bool of each group by the characters of the message that is answered."""
    return _cut(np.asarray([len(row.prompt) for row in rows]), _PROMPT_CHARS)


def by_role(rows: Sequence[LabelledRow]) -> list[tuple[str, Array]]:
    """First turns, later turns, and the later ones by how often the assistant has spoken before."""
    earlier = np.asarray([row.num_earlier_replies for row in rows])
    groups = [("first turn", earlier == 0), ("later turns", earlier > 0)]
    later = [(f"after {label} replies", mask) for label, mask in _cut(earlier, _EARLIER_REPLIES)[1:]]
    groups += [(label.replace("after 1 replies", "after 1 reply"), mask) for label, mask in later]
    return [(label, mask) for label, mask in groups if mask.any()]


def _cut(values: Array, cuts: Sequence[int]) -> list[tuple[str, Array]]:
    member = np.searchsorted(np.asarray(cuts), values, side="right")
    starts, ends = (0, *cuts), (*(cut - 1 for cut in cuts), None)
    labels = [
        f"{low} and more" if high is None else str(low) if low == high else f"{low} to {high}"
        for low, high in zip(starts, ends, strict=True)
    ]
    return [(label, member == index) for index, label in enumerate(labels)]


def group_errors(
    groups: Sequence[tuple[str, Array]],
    forecasts: Forecasts,
    truth: Truth,
    modal_bucket: int,
    granularity_tokens: int,
    *,
    coverage: float,
    num_resamples: int,
    seed: int = 0,
) -> list[GroupErrors]:
    """Errors of the groups that hold rows, with 95 % intervals by conversation.

    Args:
        groups: label and (rows,) bool.
        modal_bucket: the training split's, at `granularity_tokens`.
    """
    lengths = truth.lengths_tokens
    scores = row_scores(forecasts, lengths, [granularity_tokens], coverage)
    num_buckets = forecasts.regrouped(granularity_tokens).shape[1]
    modal = bucket_of(lengths, granularity_tokens, num_buckets) == modal_bucket
    bias = forecasts.means() - lengths
    upper = forecasts.quantiles(coverage)
    roots = np.asarray(truth.roots)

    def errors(label: str, mask: Array) -> GroupErrors:
        drawn = Resamples(roots[mask].tolist(), num_resamples, seed)

        def mean(values: Array) -> Interval:
            return resampled.interval(resampled.means(drawn, values[mask][:, None])[:, 0])

        return GroupErrors(
            label=label,
            num_rows=int(mask.sum()),
            accuracy=mean(scores[f"accuracy_{granularity_tokens}"]),
            modal_accuracy=float(modal[mask].mean()),
            mae_tokens=mean(scores["mae_tokens"]),
            bias_tokens=float(bias[mask].mean()),
            coverage=share_covered(lengths[mask], upper[mask], truth.cap_tokens),
        )

    return [errors(label, mask) for label, mask in groups if mask.any()]
