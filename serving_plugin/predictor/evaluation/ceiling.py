"""The noise ceiling: how well one sample of a reply forecasts another of the same reply.

Nothing that sees the conversation alone can be expected to do much better than this at naming buckets. Heavy: see
`metrics`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from serving_plugin.predictor.evaluation.bootstrap import bootstrap
from serving_plugin.predictor.evaluation.metrics import (
    GRANULARITIES_TOKENS,
    BucketAccuracy,
    KendallTau,
    MeanAbsoluteErrorTokens,
    finite,
    score_split,
)
from serving_plugin.predictor.evaluation.scores import Array, Truth
from serving_plugin.predictor.rows import LabelledRow
from serving_plugin.predictor.spec import PredictorSpec


def resample_oracle(
    rows: Sequence[LabelledRow],
    *,
    granularities_tokens: Sequence[int] = GRANULARITIES_TOKENS,
    num_resamples: int = 0,
    seed: int = 0,
    predictor: tuple[PredictorSpec, Array] | None = None,
) -> dict[str, Any] | None:
    """Another sample's length as the prediction, over all ordered pairs of samples of one reply.

    Rows with the same id are samples of one reply. Accuracy and MAE are means over the pairs. Tau-b is taken over the
    replies for each ordered pair of sample numbers (first by second, second by first, ...) and averaged, since pairs
    of one reply say nothing about its rank among the others. Lengths are cut at the rows' cap. `_low` and `_high`:
    bootstrap by conversation.

    Args:
        predictor: with its (rows, fine buckets) probabilities: `predictor` is then its metrics (`score_split`) on the
            samples of those replies alone, which are not the whole split.

    Returns:
        Flat metrics with `num_replies` and `num_samples`; None when no reply has two samples.
    """
    truth = Truth.of(rows)
    samples: dict[str, list[int]] = {}
    for row_id, length in zip(truth.ids, truth.lengths_tokens.tolist(), strict=True):
        samples.setdefault(row_id, []).append(length)
    repeated = {row_id: lengths for row_id, lengths in samples.items() if len(lengths) > 1}
    if not repeated:
        return None
    root_of = dict(zip(truth.ids, truth.roots, strict=True))
    roots = [root_of[row_id] for row_id in repeated]
    table = _table(list(repeated.values()))
    report: dict[str, Any] = {"num_replies": len(repeated), "num_samples": sum(map(len, repeated.values()))}
    for name, statistic in _statistics(table, granularities_tokens).items():
        found = bootstrap(statistic, roots, num_resamples, seed)
        report |= {name: finite(found.value), f"{name}_low": finite(found.low), f"{name}_high": finite(found.high)}
    if predictor is not None:
        spec, probabilities = predictor
        chosen = [i for i, row_id in enumerate(truth.ids) if row_id in repeated]
        found_here = score_split(
            spec,
            probabilities[chosen],
            [rows[i] for i in chosen],
            granularities_tokens=granularities_tokens,
            num_resamples=num_resamples,
            seed=seed,
        )
        del found_here["baselines"]
        report["predictor"] = found_here
    return report


def _table(lengths: Sequence[Sequence[int]]) -> Array:
    """(replies, most samples) lengths, NaN where a reply has fewer."""
    table = np.full((len(lengths), max(map(len, lengths))), math.nan)
    for i, row in enumerate(lengths):
        table[i, : len(row)] = row
    return table


def _statistics(table: Array, granularities_tokens: Sequence[int]) -> dict[str, Callable[[Array], float]]:
    accuracy, error, tau = BucketAccuracy(), MeanAbsoluteErrorTokens(), KendallTau()

    def pairs(chosen: Array) -> list[tuple[Array, Array]]:
        held = table[chosen]
        found = []
        for said, came in itertools.permutations(range(held.shape[1]), 2):
            both = ~np.isnan(held[:, said]) & ~np.isnan(held[:, came])
            found.append((held[both, said], held[both, came]))
        return found

    def pooled(chosen: Array) -> tuple[Array, Array]:
        said, came = zip(*pairs(chosen), strict=True)
        return np.concatenate(said), np.concatenate(came)

    def accuracy_at(width: int) -> Callable[[Array], float]:
        def statistic(chosen: Array) -> float:
            said, came = pooled(chosen)
            return float(accuracy._compute(said // width, came // width)["accuracy"])

        return statistic

    def ranked(chosen: Array) -> float:
        # one reply alone, or all of one length: no rank
        values = [tau._compute(said, came)["kendall_tau"] for said, came in pairs(chosen) if len(said) > 1]
        return float(np.mean(values)) if values else math.nan

    # `_compute` and not `compute`: the latter writes every resample to an Arrow table first
    return {
        **{f"accuracy_{width}": accuracy_at(width) for width in granularities_tokens},
        "mae_tokens": lambda chosen: float(error._compute(*pooled(chosen))["mae_tokens"]),
        "kendall_tau": ranked,
    }
