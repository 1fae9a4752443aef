"""Forecasts of many rows at once, and what each row's forecast is worth: (rows, buckets) in, (rows,) out. numpy only.

`Forecasts` is `core.forecast.LengthForecast` for arrays: the same buckets, the same uniform mass inside one, the same
whole-token quantiles. Scores of a split are means of these rows or come from `resampled`.

A reply that was cut at a limit is "at least". The forecast is clipped at the same limit before it is scored, so that
all it says of lengths from there on counts as right, and nothing about such a row is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serving_plugin.predictor.rows import LabelledRow

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

LEAST_PROBABILITY = 1e-9  # a baseline may call a bucket impossible: its log-likelihood stays finite


@dataclass(frozen=True, slots=True)
class Forecasts:
    """(rows, buckets) probabilities, each row summing to one; bucket i is `[edges[i], edges[i + 1])` tokens."""

    edges_tokens: tuple[int, ...]
    probabilities: FloatArray

    @classmethod
    def from_weights(cls, edges_tokens: Sequence[int], weights: Array) -> Forecasts:
        """Normalised from non-negative (rows, buckets) weights.

        Raises:
            ValueError: the shapes do not fit, or a row has no mass.
        """
        held = np.asarray(weights, dtype=np.float64)
        if held.ndim != 2 or held.shape[1] != len(edges_tokens) - 1:
            raise ValueError(f"weights of shape {held.shape} do not fit {len(edges_tokens) - 1} buckets")
        total = held.sum(axis=1, keepdims=True)
        if not np.all(total > 0):
            raise ValueError("a row of weights has no mass: no forecast")
        return cls(tuple(int(edge) for edge in edges_tokens), held / total)

    @property
    def _lows(self) -> Array:
        return np.asarray(self.edges_tokens[:-1], dtype=np.int64)

    @property
    def _widths(self) -> Array:
        return np.diff(np.asarray(self.edges_tokens, dtype=np.int64))

    def clipped(self, max_tokens: int | None) -> Forecasts:
        """Under a limit of `max_tokens`, mass beyond it on the limit itself; None: as it is."""
        if max_tokens is None or max_tokens + 1 >= self.edges_tokens[-1]:
            return self
        kept = self._lows < max_tokens
        shares = self.probabilities[:, kept] * np.minimum(1.0, (max_tokens - self._lows[kept]) / self._widths[kept])
        at_limit = np.maximum(0.0, 1.0 - shares.sum(axis=1, keepdims=True))
        edges = (*self._lows[kept].tolist(), max_tokens, max_tokens + 1)
        return Forecasts.from_weights(edges, np.concatenate([shares, at_limit], axis=1))

    def regrouped(self, granularity_tokens: int) -> FloatArray:
        """(rows, ceil(last edge / granularity)) over `[0, G), [G, 2G), ...`; a split bucket's mass is shared evenly."""
        left = np.arange(0, self.edges_tokens[-1], granularity_tokens)[None, :]
        low, width = self._lows[:, None], self._widths[:, None]
        overlap = np.minimum(low + width, left + granularity_tokens) - np.maximum(low, left)
        coarse: FloatArray = self.probabilities @ (np.maximum(overlap, 0) / width)
        return coarse

    def quantiles(self, level: float) -> Array:
        """(rows,) smallest whole number of tokens x with P(length <= x) >= level."""
        cumulative = np.cumsum(self.probabilities, axis=1)
        positive = self.probabilities > 0
        reached = (cumulative >= level - 1e-12) & positive
        last = positive.shape[1] - 1 - positive[:, ::-1].argmax(axis=1)  # probabilities sum to one only nearly
        bucket = np.where(reached.any(axis=1), reached.argmax(axis=1), last)
        rows = np.arange(len(bucket))
        mass, width = self.probabilities[rows, bucket], self._widths[bucket]
        inside = np.maximum(0.0, (level - (cumulative[rows, bucket] - mass)) / mass)
        steps = np.ceil(inside * width - 1e-9).astype(np.int64) - 1
        quantile: Array = self._lows[bucket] + np.clip(steps, 0, width - 1)
        return quantile

    def means(self) -> FloatArray:
        """(rows,) expected length in tokens."""
        mean: FloatArray = self.probabilities @ (self._lows + (self._widths - 1) / 2)
        return mean

    def probability_over(self, num_tokens: int) -> FloatArray:
        """(rows,) P(length > num_tokens)."""
        shares = np.clip((self._lows + self._widths - 1 - num_tokens) / self._widths, 0.0, 1.0)
        over: FloatArray = self.probabilities @ shares
        return over

    def bucket_of(self, lengths_tokens: Array) -> Array:
        """(rows,) index of each length's bucket; beyond the last edge, the last."""
        found = np.searchsorted(np.asarray(self.edges_tokens), np.asarray(lengths_tokens), side="right") - 1
        buckets: Array = np.clip(found, 0, len(self.edges_tokens) - 2)
        return buckets

    def below(self, lengths_tokens: Array) -> FloatArray:
        """(rows,) P(length < the row's own length)."""
        lengths = np.asarray(lengths_tokens, dtype=np.int64)
        bucket, rows = self.bucket_of(lengths), np.arange(len(lengths))
        mass = self.probabilities[rows, bucket]
        before = np.cumsum(self.probabilities, axis=1)[rows, bucket] - mass
        inside = np.clip((lengths - self._lows[bucket]) / self._widths[bucket], 0.0, 1.0)
        result: FloatArray = np.clip(before + mass * inside, 0.0, 1.0)
        return result

    def negative_log_likelihood(self, lengths_tokens: Array) -> FloatArray:
        """(rows,) -log P(the bucket that came), at least `LEAST_PROBABILITY`; natural logarithm."""
        mass = self.probabilities[np.arange(len(self.probabilities)), self.bucket_of(lengths_tokens)]
        result: FloatArray = -np.log(np.maximum(mass, LEAST_PROBABILITY))
        return result

    def crps_tokens(self, lengths_tokens: Array) -> FloatArray:
        """(rows,) continuous ranked probability score: sum over whole t of (P(length <= t) - [true length <= t])^2.

        In tokens; for a forecast of one length it is the absolute error. In a bucket P rises by equal steps, so its
        sum of squares has a closed form. Source: Gneiting & Raftery, JASA 2007, for the score.
        """
        lengths = np.asarray(lengths_tokens, dtype=np.int64)
        width = self._widths.astype(np.float64)[None, :]
        mass = self.probabilities
        before = np.cumsum(mass, axis=1) - mass
        # tokens of each bucket below the true length: none, some, or all
        steps = np.clip(lengths[:, None] - self._lows[None, :], 0, self._widths[None, :]).astype(np.float64)
        missed = _sum_of_squares(before, mass / width, steps)
        after = _sum_of_squares(1.0 - before, -mass / width, width) - _sum_of_squares(
            1.0 - before, -mass / width, steps
        )
        outside = np.maximum(0, lengths - self.edges_tokens[-1])
        result: FloatArray = (missed + after).sum(axis=1) + outside
        return result


def _sum_of_squares(start: Array, slope: Array, steps: Array) -> Array:
    """Sum over j = 1 .. steps of (start + slope * j)^2."""
    linear, square = steps * (steps + 1), steps * (steps + 1) * (2 * steps + 1) / 6
    result: Array = steps * start**2 + start * slope * linear + slope**2 * square
    return result


@dataclass(frozen=True, slots=True)
class Truth:
    """What came. All (rows,): `lengths_tokens` (none over `cap_tokens`), `roots` the conversations, `ids` the replies.

    `cap_tokens` is the largest censored length, the limit that all rows of a file share; None when none was cut, or a
    whole reply is longer, so that there is no such limit. `num_cut_early` rows were cut elsewhere than at the cap: they
    count at the length where they were cut, for want of a better.
    """

    ids: tuple[str, ...]
    roots: tuple[str, ...]
    lengths_tokens: Array
    cap_tokens: int | None
    num_censored: int
    num_cut_early: int

    @classmethod
    def of(cls, rows: Sequence[LabelledRow]) -> Truth:
        """From labelled rows, in their order."""
        cuts = [row.output_tokens for row in rows if row.censored]
        lengths = np.asarray([row.output_tokens for row in rows], dtype=np.int64)
        cap = max(cuts, default=None)
        if cap is not None and lengths.max() > cap:
            cap = None
        return cls(
            ids=tuple(row.id for row in rows),
            roots=tuple(row.root_id for row in rows),
            lengths_tokens=lengths,
            cap_tokens=cap,
            num_censored=len(cuts),
            num_cut_early=sum(cut != cap for cut in cuts),
        )

    def forecasts(self, edges_tokens: Sequence[int], probabilities: Array) -> Forecasts:
        """(rows, buckets) made comparable with these lengths: normalised and clipped at the cap."""
        return Forecasts.from_weights(edges_tokens, probabilities).clipped(self.cap_tokens)


def bucket_of(lengths_tokens: Array, width_tokens: int, num_buckets: int) -> Array:
    """Index of each length's bucket `[i * width, (i + 1) * width)`, at most the last."""
    buckets: Array = np.minimum(np.asarray(lengths_tokens) // width_tokens, num_buckets - 1)
    return buckets


def covered_by(lengths_tokens: Array, upper_tokens: Array, cap_tokens: int | None) -> tuple[Array, Array]:
    """(rows,) bool twice: which rows are judged, and which of these are at or below their upper quantile.

    Judged are rows whose quantile lies below `cap_tokens`, where replies were cut: at the cap every reply is covered,
    whatever the forecast is worth.
    """
    judged = np.full(len(upper_tokens), True) if cap_tokens is None else upper_tokens < cap_tokens
    return judged, judged & (lengths_tokens <= upper_tokens)


def share_covered(lengths_tokens: Array, upper_tokens: Array, cap_tokens: int | None) -> float | None:
    """Coverage: the share of the judged rows that are covered; None where no row is judged."""
    judged, covered = covered_by(lengths_tokens, upper_tokens, cap_tokens)
    return float(covered.sum() / judged.sum()) if judged.any() else None


def row_scores(
    forecasts: Forecasts,
    lengths_tokens: Array,
    granularities_tokens: Sequence[int],
    coverage: float,
    cap_tokens: int | None = None,
) -> dict[str, Array]:
    """Score name -> (rows,); the mean over rows is the split's figure.

    `accuracy_W` and `within_one_W` (bool): the likeliest bucket of W tokens is the true one, or next to it.
    `mae_tokens`: |median - length|. `crps_tokens`, `nll`: see `Forecasts`. `coverage` and `coverage_judged` (bool): see
    `covered_by`, of the `coverage` quantile; here the split's figure is the ratio of the means. `over_reserved_tokens`:
    how far that quantile is above the length. `interval_coverage` (bool) and `interval_width_tokens`: the central
    interval.
    """
    lengths = np.asarray(lengths_tokens, dtype=np.int64)
    scores: dict[str, Array] = {}
    for width in granularities_tokens:
        coarse = forecasts.regrouped(width)
        away = np.abs(coarse.argmax(axis=1) - bucket_of(lengths, width, coarse.shape[1]))
        scores[f"accuracy_{width}"], scores[f"within_one_{width}"] = away == 0, away <= 1
    tail = (1.0 - coverage) / 2
    upper, low, high = forecasts.quantiles(coverage), forecasts.quantiles(tail), forecasts.quantiles(1.0 - tail)
    scores["mae_tokens"] = np.abs(forecasts.quantiles(0.5) - lengths)
    scores["crps_tokens"] = forecasts.crps_tokens(lengths)
    scores["nll"] = forecasts.negative_log_likelihood(lengths)
    scores["coverage_judged"], scores["coverage"] = covered_by(lengths, upper, cap_tokens)
    scores["over_reserved_tokens"] = np.maximum(upper - lengths, 0)
    scores["interval_coverage"] = (low <= lengths) & (lengths <= high)
    scores["interval_width_tokens"] = high + 1 - low
    return scores
