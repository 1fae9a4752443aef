"""Statistics of a split for all bootstrap draws at once: a draw is a weight per row, not a copy of rows. numpy only.

The draws are those of `bootstrap.bootstrap` for the same roots and seed (tests hold the two together); a thousand of
them over thousands of rows and several predictors take seconds here, since sums over rows become matrix products.

Every function returns (1 + resamples,): element 0 is the statistic of the split itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from serving_plugin.predictor.evaluation.bootstrap import PERCENTILES, Interval
from serving_plugin.predictor.evaluation.scores import Array, FloatArray, Forecasts

TAU_RESAMPLES = 200  # rank correlation needs every pair of rows: fewer draws keep it to seconds
_BLOCK = 256
NUM_BINS = 10


class Resamples:
    """Weights of the conversations in every draw.

    Args:
        roots: (rows,) the conversation of each row; whole conversations are drawn, since their turns are alike.
        num_resamples: draws; 0 gives values without bounds.
        seed: the same seed and roots give the same draws, so differences between predictors are paired.
    """

    def __init__(self, roots: Sequence[str], num_resamples: int, seed: int) -> None:
        names, member = np.unique(np.asarray(roots), return_inverse=True)
        if not len(names):
            raise ValueError("scores need at least one row")
        rng = np.random.default_rng(seed)
        self.member = member
        self.num_rows = len(member)
        self.weights = np.ones((1 + num_resamples, len(names)), dtype=np.float32)
        for draw in range(1, 1 + num_resamples):
            drawn = rng.integers(0, len(names), len(names))
            self.weights[draw] = np.bincount(drawn, minlength=len(names))
        self._by_root = np.argsort(member, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(member))[:-1]])
        self.totals = self.sums(np.ones((self.num_rows, 1)))[:, 0]

    def sums(self, values: Array) -> FloatArray:
        """(rows, k) -> (draws, k) sums over the drawn rows."""
        held = np.asarray(values, dtype=np.float64)[self._by_root]
        result: FloatArray = self.weights.astype(np.float64) @ np.add.reduceat(held, self._starts, axis=0)
        return result

    def blocks(self, limit: int | None = None) -> Iterator[Array]:
        """(up to 256, rows) float32 row weights, draw after draw; `limit` bounds the resamples."""
        weights = self.weights if limit is None else self.weights[: 1 + limit]
        for start in range(0, len(weights), _BLOCK):
            yield weights[start : start + _BLOCK, self.member]


def interval(draws: FloatArray) -> Interval:
    """Value and 95 % percentile bounds; draws that are NaN (undefined) are left out."""
    defined = draws[1:][~np.isnan(draws[1:])]
    if not len(defined):
        return Interval(float(draws[0]), math.nan, math.nan)
    low, high = np.percentile(defined, PERCENTILES)
    return Interval(float(draws[0]), float(low), float(high))


def means(resamples: Resamples, values: Array) -> FloatArray:
    """Means of (rows, k) values: (draws, k)."""
    result: FloatArray = resamples.sums(values) / resamples.totals[:, None]
    return result


def median(resamples: Resamples, values: Array) -> FloatArray:
    """Median of (rows,) values."""
    order = np.argsort(values, kind="stable")
    ordered, parts = np.asarray(values, dtype=np.float64)[order], []
    for weights in resamples.blocks():
        reached = np.cumsum(weights[:, order], axis=1, dtype=np.float64)
        half = reached[:, -1:] / 2
        parts.append((ordered[(reached >= half).argmax(axis=1)] + ordered[(reached > half).argmax(axis=1)]) / 2)
    return np.concatenate(parts)


def macro_f1(resamples: Resamples, predicted: Array, actual: Array) -> FloatArray:
    """Mean F1 over the classes that were predicted or occurred; both (rows,) class indices."""
    classes = np.arange(max(int(np.max(predicted)), int(np.max(actual))) + 1)
    said, came = np.asarray(predicted)[:, None] == classes, np.asarray(actual)[:, None] == classes
    counts = resamples.sums(np.concatenate([said & came, said, came], axis=1))
    hits, num_said, num_came = np.split(counts, 3, axis=1)
    present = num_said + num_came > 0
    scores = np.where(present, 2 * hits / np.maximum(num_said + num_came, 1), 0.0)
    result: FloatArray = scores.sum(axis=1) / present.sum(axis=1)
    return result


def over_reserved_at_coverage(
    resamples: Resamples, forecasts: Forecasts, lengths_tokens: Array, coverage: float
) -> FloatArray:
    """Mean over-reserved tokens at the level where each draw is covered just as asked.

    It compares sharpness between models that are not equally calibrated. Every draw chooses its own level: with the
    split's the intervals would be too narrow.
    """
    # covered means P(length < y) < level: the level just above the wanted share of these
    below = forecasts.below(lengths_tokens)
    order, parts = np.argsort(below, kind="stable"), []
    for weights in resamples.blocks():
        reached = np.cumsum(weights[:, order], axis=1, dtype=np.float64)
        wanted = np.ceil(coverage * (reached[:, -1:] - 1))  # rank from 0, as np.quantile's method "higher"
        parts.append(below[order][(reached > wanted).argmax(axis=1)])
    levels, chosen = np.unique(np.minimum(1.0, np.concatenate(parts) + 1e-7), return_inverse=True)
    over = np.column_stack([np.maximum(forecasts.quantiles(level) - lengths_tokens, 0) for level in levels.tolist()])
    result: FloatArray = means(resamples, over)[np.arange(len(chosen)), chosen]
    return result


def expected_calibration_error(resamples: Resamples, confidence: Array, hit: Array) -> FloatArray:
    """Mean |confidence - accuracy| over ten bins of equal width, weighted by rows (Guo et al., ICML 2017).

    Noise in a bin only ever adds to it, so small values are estimated too high and their draws higher still.
    """
    gaps = np.zeros((resamples.num_rows, NUM_BINS))
    gaps[np.arange(resamples.num_rows), confidence_bin(confidence)] = confidence - np.asarray(hit, dtype=np.float64)
    result: FloatArray = np.abs(resamples.sums(gaps)).sum(axis=1) / resamples.totals
    return result


def confidence_bin(confidence: Array) -> Array:
    """(rows,) which tenth of [0, 1] a confidence lies in."""
    bins: Array = np.clip((np.asarray(confidence) * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    return bins


def auroc(resamples: Resamples, score: Array, positive: Array) -> FloatArray:
    """Area under the ROC curve, ties counted half; NaN where a draw has one class only."""
    order = np.argsort(score, kind="stable")
    starts = _starts_of_ties(np.asarray(score)[order])
    is_positive, parts = np.asarray(positive, dtype=bool)[order], []
    for weights in resamples.blocks():
        held = weights[:, order]
        good = np.add.reduceat(held * is_positive, starts, axis=1, dtype=np.float64)
        bad = np.add.reduceat(held * ~is_positive, starts, axis=1, dtype=np.float64)
        wins = (good * (np.cumsum(bad, axis=1) - bad / 2)).sum(axis=1)
        pairs = good.sum(axis=1) * bad.sum(axis=1)
        parts.append(np.where(pairs > 0, wins / np.maximum(pairs, 1), math.nan))
    return np.concatenate(parts)


def kendall_tau(resamples: Resamples, predicted: Array, actual: Array) -> FloatArray:
    """Tau-b of (rows,) and (rows,), for at most `TAU_RESAMPLES` draws; NaN where either is constant.

    All pairs at once: w' S w with S the (rows, rows) signs of agreement, in blocks; time grows with rows squared.
    """
    weights = np.concatenate(list(resamples.blocks(TAU_RESAMPLES)))
    x, y = _ranks(predicted), _ranks(actual)
    agreement = np.zeros(len(weights))
    for start in range(0, len(x), _BLOCK):
        rows = slice(start, start + _BLOCK)
        signs = np.sign(x[rows, None] - x[None, :]) * np.sign(y[rows, None] - y[None, :])
        agreement += np.einsum("ij,ij->i", weights[:, rows], weights @ signs.T, dtype=np.float64)
    total = weights.sum(axis=1, dtype=np.float64) ** 2
    untied = (total - _tied_pairs(weights, x)) * (total - _tied_pairs(weights, y))
    result: FloatArray = np.where(untied > 0, agreement / np.sqrt(np.maximum(untied, 1)), math.nan)
    return result


def _ranks(values: Array) -> Array:
    """Dense ranks as float32: exact below 2^24, and signs of their differences are those of the values'."""
    ranks: Array = np.unique(np.asarray(values), return_inverse=True)[1].astype(np.float32)
    return ranks


def _tied_pairs(weights: Array, ranks: Array) -> FloatArray:
    """Ordered pairs of equal rank, a row with itself included, in every draw."""
    order = np.argsort(ranks, kind="stable")
    grouped = np.add.reduceat(weights[:, order], _starts_of_ties(ranks[order]), axis=1, dtype=np.float64)
    result: FloatArray = (grouped**2).sum(axis=1)
    return result


def _starts_of_ties(ordered: Array) -> Array:
    starts: Array = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return starts
