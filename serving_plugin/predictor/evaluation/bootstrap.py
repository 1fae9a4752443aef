"""Bootstrap by conversation: percentile intervals of any statistic of a split's rows. numpy only.

Whole conversations are drawn with replacement, since turns of one conversation are alike: drawing single rows would
give intervals that are too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic and the bounds of its 95 % interval, in the statistic's unit; bounds that are not known are NaN."""

    value: float
    low: float
    high: float

    def to_plain(self) -> dict[str, float | None]:
        """For JSON: four decimals, None for NaN."""
        named = {"value": self.value, "low": self.low, "high": self.high}
        return {name: None if math.isnan(number) else round(number, 4) for name, number in named.items()}


def bootstrap(
    statistic: Callable[[Array], float], roots: Sequence[str] | Array, num_resamples: int, seed: int
) -> Interval:
    """The statistic of all rows and its 95 % percentile interval over resampled conversations.

    Args:
        statistic: from row indices (chosen,), some of them twice, to a number; NaN where it is undefined.
        roots: (rows,) the conversation of each row.
        num_resamples: draws; below 1 the bounds are NaN. Draws whose statistic is NaN are left out.
        seed: the same seed and roots draw the same conversations.

    Raises:
        ValueError: there are no rows.
    """
    groups, member = np.unique(np.asarray(roots), return_inverse=True)
    if not len(groups):
        raise ValueError("a bootstrap needs at least one row")
    rows = np.argsort(member, kind="stable")  # conversation after conversation
    sizes = np.bincount(member)
    first = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    value = float(statistic(np.arange(len(rows))))
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(num_resamples):
        drawn = rng.integers(0, len(groups), len(groups))
        counts = sizes[drawn]
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        draws.append(float(statistic(rows[np.repeat(first[drawn], counts) + inside])))
    defined = [draw for draw in draws if not math.isnan(draw)]
    if not defined:
        return Interval(value, math.nan, math.nan)
    low, high = np.percentile(defined, PERCENTILES)
    return Interval(value, float(low), float(high))


def paired_gain(a: Array, b: Array, roots: Sequence[str] | Array, num_resamples: int, seed: int) -> Interval:
    """Mean of `a` minus mean of `b`, both scored on the same rows: (rows,) each, in their common unit.

    Raises:
        ValueError: a, b and roots are not of one length, or empty.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape or first.shape != (len(roots),):
        raise ValueError(f"paired scores need one shape (rows,), got {first.shape}, {second.shape}, {len(roots)} roots")
    difference = first - second
    return bootstrap(lambda chosen: float(difference[chosen].mean()), roots, num_resamples, seed)
