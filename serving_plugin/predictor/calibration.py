"""Making a forecast's probabilities mean what they say: temperature, then distributional conformal calibration.

The probability integral transform (PIT) of a row is F(y), its forecast distribution at the length that came. On
held-out rows the PIT of a calibrated model is uniform. `fit_recalibration` takes its distribution G on the calibration
split, and `Recalibration.apply` replaces F by G(F): then the one-sided quantile at level a covers a share a of new
exchangeable rows, at every level at once (distributional conformal prediction, Chernozhukov et al., PNAS 2021, with the
finite-sample rank ceil((n + 1) a)). Rows are grouped (Mondrian conformal), so that coverage holds within each group.

A censored reply is "at least": its PIT lies somewhere above F(cut), and Kaplan-Meier spreads it (Kaplan & Meier 1958).
Temperature: Guo et al., ICML 2017. Conformal libraries work on point scores or classes, not on a whole distribution
with censored rows; this is a page of numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NUM_KNOTS = 100
MIN_GROUP_ROWS = 200  # below this a group borrows the knots of all rows


@dataclass(frozen=True, slots=True)
class Recalibration:
    """Piecewise linear maps G of [0, 1] onto itself, one for each group of requests.

    A request belongs to the group of its last message's length and of whether the assistant has spoken before:
    `prompt_edges_tokens` cut the lengths, first turns come first. `knots[group]` are the PIT values at the levels
    0, 1/NUM_KNOTS, ..., 1.
    """

    temperature: float
    prompt_edges_tokens: tuple[int, ...]
    knots: tuple[tuple[float, ...], ...]

    @property
    def num_groups(self) -> int:
        """Groups: lengths x (first turn, later turn)."""
        return num_groups(self.prompt_edges_tokens)

    def apply(self, probabilities: Array, groups: Array) -> Array:
        """(rows, buckets) probabilities after temperature -> calibrated ones; `groups` is (rows,) of group indices."""
        cumulative = np.concatenate(
            [np.zeros((len(probabilities), 1)), np.cumsum(probabilities, axis=1, dtype=np.float64)], axis=1
        )
        cumulative /= np.maximum(cumulative[:, -1:], 1e-12)
        levels = np.linspace(0.0, 1.0, NUM_KNOTS + 1)
        for group in np.unique(groups):
            rows = groups == group
            cumulative[rows] = np.interp(cumulative[rows], self.knots[int(group)], levels)
        result: Array = np.maximum(np.diff(cumulative, axis=1), 0.0)
        result /= result.sum(axis=1, keepdims=True)
        return result

    def to_json(self) -> dict[str, Any]:
        """For `predictor.json`."""
        return {
            "temperature": self.temperature,
            "prompt_edges_tokens": list(self.prompt_edges_tokens),
            # not rounded: equal knots at 0 would move mass out of the first bucket
            "knots": [list(knots) for knots in self.knots],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recalibration:
        """Inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: not such an object.
        """
        knots = tuple(tuple(float(value) for value in row) for row in content["knots"])
        edges = tuple(int(value) for value in content["prompt_edges_tokens"])
        if len(knots) != num_groups(edges) or any(len(row) != NUM_KNOTS + 1 for row in knots):
            raise ValueError(f"calibration needs {num_groups(edges)} groups of {NUM_KNOTS + 1} knots")
        return cls(float(content["temperature"]), edges, knots)


def identity() -> Recalibration:
    """The calibration that changes nothing."""
    return Recalibration(1.0, (), (tuple(np.linspace(0.0, 1.0, NUM_KNOTS + 1).tolist()),) * 2)


def num_groups(prompt_edges_tokens: Sequence[int]) -> int:
    """Groups that these edges make."""
    return 2 * (len(prompt_edges_tokens) + 1)


def group_of(prompt_edges_tokens: Sequence[int], num_prompt_tokens: Array, num_earlier_replies: Array) -> Array:
    """(rows,) group indices from the last message's tokens and the number of earlier replies, both (rows,)."""
    lengths = np.searchsorted(np.asarray(prompt_edges_tokens, dtype=np.int64), num_prompt_tokens, side="right")
    groups: Array = lengths + (len(prompt_edges_tokens) + 1) * (np.asarray(num_earlier_replies) > 0)
    return groups


def pit_values(edges_tokens: Sequence[int], probabilities: Array, lengths_tokens: Array) -> Array:
    """(rows,) F(y): the forecast's P(length <= y), the length uniform within its bucket; 1 beyond the last edge."""
    edges = np.asarray(edges_tokens, dtype=np.float64)
    at = np.minimum(np.asarray(lengths_tokens, dtype=np.float64) + 1.0, edges[-1])
    bucket = np.clip(np.searchsorted(edges, at, side="left") - 1, 0, len(edges) - 2)
    inside = (at - edges[bucket]) / (edges[bucket + 1] - edges[bucket])
    rows = np.arange(len(bucket))
    below = np.cumsum(probabilities, axis=1)[rows, bucket] - probabilities[rows, bucket]
    result: Array = np.clip(below + probabilities[rows, bucket] * inside, 0.0, 1.0)
    return result


def fit_recalibration(
    temperature: float, prompt_edges_tokens: Sequence[int], pits: Array, censored: Array, groups: Array
) -> Recalibration:
    """Knots of every group from the PIT values of held-out rows, all (rows,)."""
    everything = conformal_knots(pits, censored)
    knots = []
    for group in range(num_groups(prompt_edges_tokens)):
        rows = groups == group
        enough = int(rows.sum()) >= MIN_GROUP_ROWS
        knots.append(tuple(conformal_knots(pits[rows], censored[rows]).tolist() if enough else everything.tolist()))
    return Recalibration(temperature, tuple(prompt_edges_tokens), tuple(knots))


def conformal_knots(pits: Array, censored: Array) -> Array:
    """(NUM_KNOTS + 1,) PIT values at evenly spaced levels: rising from 0 to 1.

    Level a gets the smallest value whose share (Kaplan-Meier; the plain empirical share when nothing is censored) times
    n / (n + 1) reaches a: the conformal rank. Levels that censored rows leave unidentified (all lengths beyond the
    limit) rise evenly to 1: there the model keeps its own shape.
    """
    values, shares = _kaplan_meier(pits, censored)
    shares = shares * len(pits) / (len(pits) + 1)
    levels = np.linspace(0.0, 1.0, NUM_KNOTS + 1)[1:-1]
    found = np.searchsorted(shares, levels - 1e-12, side="left")
    inner = np.where(found < len(values), np.append(values, 1.0)[np.minimum(found, len(values))], 1.0)
    if censored.any():
        last_value, last_share = (values[-1], shares[-1]) if len(values) else (0.0, 0.0)
        unknown = found >= len(values)
        inner[unknown] = last_value + (1.0 - last_value) * (levels[unknown] - last_share) / (1.0 - last_share)
    # strictly rising, so that the map can be read both ways
    rising = np.maximum.accumulate(np.concatenate([[0.0], inner, [1.0]]) + np.linspace(0.0, 1e-9, NUM_KNOTS + 1))
    result: Array = rising / rising[-1]
    return result


def softmax(logits: Array) -> Array:
    """Rows of logits as probabilities, in float64."""
    shifted = np.exp(np.asarray(logits, dtype=np.float64) - np.max(logits, axis=1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=1, keepdims=True)
    return result


def _kaplan_meier(values: Array, censored: Array) -> tuple[Array, Array]:
    """Distinct uncensored values, rising, and the estimated share of rows at or below each."""
    if len(values) == 0:
        return np.asarray([]), np.asarray([])
    events = np.unique(values[~censored])
    ordered = np.sort(values)
    at_risk = len(values) - np.searchsorted(ordered, events, side="left")
    deaths_sorted = np.sort(values[~censored])
    deaths = np.searchsorted(deaths_sorted, events, side="right") - np.searchsorted(deaths_sorted, events, side="left")
    survival = np.cumprod(1.0 - deaths / at_risk)
    return events, 1.0 - survival


def fit_temperature(logits: Array, allowed: Array) -> float:
    """Temperature T in [0.25, 4] that minimises the negative log-likelihood of softmax(logits / T).

    Args:
        logits: (rows, buckets).
        allowed: (rows, buckets) bool: the buckets a row's length may lie in (one, or all from the cut on if censored).
    """
    from scipy.optimize import minimize_scalar

    scaled = np.asarray(logits, dtype=np.float64)

    def loss(log_temperature: float) -> float:
        held = scaled / np.exp(log_temperature)
        held = held - held.max(axis=1, keepdims=True)
        total = np.log(np.exp(held).sum(axis=1))
        kept = np.log(np.where(allowed, np.exp(held), 0.0).sum(axis=1) + 1e-300)
        return float(np.mean(total - kept))

    found = minimize_scalar(loss, bounds=(float(np.log(0.25)), float(np.log(4.0))), method="bounded")
    return float(np.exp(found.x))
