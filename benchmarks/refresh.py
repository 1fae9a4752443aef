"""`refresh`: what is known of a reply's length once its first t tokens are out. Offline, on recorded test replies.

Three forecasts of the same replies, of those longer than t tokens:
  static      the range given before the first token, never changed
  refreshed   the same distribution conditioned on length > t: what serving does, without another model call
  refitted    gradient boosted trees on the refreshed forecast's quantiles, fitted on the calibration split
  reading     the same trees with lexical features of the first t tokens as well

What `reading` gains on `refitted` is what the tokens tell. If it were much, a second model call during decoding would
be worth its cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.record import Record, deliver, describe, say
from pipeline.files import read_json_lines
from pipeline.label import LABELLED_FOLDER
from pipeline.lexical import lexical_table
from pipeline.params import load_params
from pipeline.prepare import PREPARED_FOLDER
from pipeline.target import load_tokenizer
from pipeline.train import split_name
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.predictor.evaluation.bootstrap import paired_gain
from serving_plugin.predictor.evaluation.scores import Truth, share_covered
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import DEFAULT_MODEL_URI
from serving_plugin.predictor.rows import read_rows

MOMENTS_TOKENS = (0, 16, 32, 64, 128, 256)
COVERAGE = 0.9
NUM_RESAMPLES = 1000
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95)


__all__ = ["deliver", "run"]


@dataclass(slots=True, kw_only=True)
class RefreshResult(Record):
    """Figures by moment; lengths and errors in tokens."""

    model: str
    num_fit_rows: int
    num_test_rows: int
    moments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether anything was measured."""
        return bool(self.moments)

    def tables(self) -> Iterator[Table]:
        """One table for the console."""
        table = Table(title=f"Forecasts of {self.num_test_rows} recorded replies once t tokens are out")
        for column in ("t", "replies", "forecast", "MAE of median", "covered by p90", "over-reserved", "width of 90 %"):
            table.add_column(column, justify="left" if column == "forecast" else "right")
        for moment in self.moments:
            for name, figures in moment["forecasts"].items():
                table.add_row(
                    str(moment["tokens_out"]),
                    str(moment["num_rows"]),
                    name,
                    f"{figures['mae_tokens']:.1f}",
                    "-" if figures["coverage"] is None else f"{figures['coverage']:.1%}",
                    f"{figures['over_reserved_tokens']:.0f}",
                    f"{figures['interval_width_tokens']:.0f}",
                )
            if "mae_gain_of_reading" in moment:
                gain = moment["mae_gain_of_reading"]
                table.add_row(
                    "", "", "tokens tell, MAE", f"{gain['value']:.1f} [{gain['low']:.1f}, {gain['high']:.1f}]"
                )
        yield table


def run(model: Path, is_short: bool) -> RefreshResult:
    """Measure with the champion of the registry on the pipeline's prepared and labelled data."""
    predictor = LengthPredictor.load(DEFAULT_MODEL_URI, num_threads=2)
    limit = 200 if is_short else None
    fit_rows, test_rows = (read_rows(LABELLED_FOLDER / f"{name}.jsonl") for name in ("calibration", "test"))
    expected = split_name(load_params(), test_rows)
    fit_rows, test_rows = fit_rows[:limit], test_rows[:limit]
    if any(row.source != "recorded" for row in (*fit_rows[:1], *test_rows[:1])):
        raise ConfigurationError("this benchmark reads the recorded replies' text: set label.source to recorded")
    if predictor.spec.split != expected:
        trained = predictor.spec.split or "unknown"
        raise ConfigurationError(
            f"{predictor.resolved.uri} was trained on other splits ({trained}; here {expected}), "
            "so that it may know these replies: promote one of this data (`tetri models list`)"
        )
    replies = _replies(("calibration", "test"))
    tokenizer = load_tokenizer(str(model))
    result = RefreshResult(
        model=describe(predictor),
        num_fit_rows=len(fit_rows),
        num_test_rows=len(test_rows),
    )
    say("forecasts before the first token")
    held = {}
    for name, rows in (("fit", fit_rows), ("test", test_rows)):
        truth = Truth.of(rows)
        forecasts = predictor.to_forecasts(predictor.conversation_probabilities(rows))
        if truth.cap_tokens is not None:
            forecasts = [forecast.clipped(truth.cap_tokens) for forecast in forecasts]
        texts = [tokenizer.encode(replies[row.id], add_special_tokens=False) for row in rows]
        held[name] = (truth, forecasts, texts)
    for tokens_out in MOMENTS_TOKENS:
        say(f"{tokens_out} tokens out")
        result.moments.append(_moment(tokens_out, tokenizer, *held["fit"], *held["test"]))
    return result


def _moment(
    tokens_out: int,
    tokenizer: Any,
    fit_truth: Truth,
    fit_forecasts: Sequence[LengthForecast],
    fit_ids: Sequence[list[int]],
    test_truth: Truth,
    test_forecasts: Sequence[LengthForecast],
    test_ids: Sequence[list[int]],
) -> dict[str, Any]:
    """All three forecasts of the test replies longer than `tokens_out`."""
    left_fit = np.flatnonzero(fit_truth.lengths_tokens > tokens_out)
    left = np.flatnonzero(test_truth.lengths_tokens > tokens_out)
    lengths, cap = test_truth.lengths_tokens[left], test_truth.cap_tokens
    static = _levels([test_forecasts[i] for i in left])
    refreshed = _levels([_given(test_forecasts[i], tokens_out) for i in left])
    forecasts = {"static": _figures(static, lengths, cap), "refreshed": _figures(refreshed, lengths, cap)}
    moment: dict[str, Any] = {"tokens_out": tokens_out, "num_rows": len(left), "forecasts": forecasts}
    errors: dict[str, np.ndarray] = {}
    if tokens_out > 0:
        fit_levels = _levels([_given(fit_forecasts[i], tokens_out) for i in left_fit])
        fit_lengths = fit_truth.lengths_tokens[left_fit]
        fit_words = lexical_table([tokenizer.decode(fit_ids[i][:tokens_out]) for i in left_fit])
        words = lexical_table([tokenizer.decode(test_ids[i][:tokens_out]) for i in left])
        for name, fit_table, table in (
            ("refitted", fit_levels, refreshed),
            ("reading", np.hstack([fit_levels, fit_words]), np.hstack([refreshed, words])),
        ):
            found = _boosted_levels(fit_table, fit_lengths, table, tokens_out)
            if cap is not None:
                found = np.minimum(found, cap)
            forecasts[name] = _figures(found, lengths, cap)
            errors[name] = np.abs(found[:, LEVELS.index(0.5)] - lengths)
        roots = [test_truth.roots[i] for i in left]
        gain = paired_gain(errors["refitted"], errors["reading"], roots, NUM_RESAMPLES, 0)
        moment["mae_gain_of_reading"] = gain.to_plain()
    return moment


def _given(forecast: LengthForecast, tokens_out: int) -> LengthForecast:
    return forecast.given_more_than(tokens_out) if tokens_out else forecast


def _levels(forecasts: Sequence[LengthForecast]) -> np.ndarray:
    """(rows, LEVELS) quantiles."""
    return np.asarray([[forecast.quantile(level) for level in LEVELS] for forecast in forecasts], dtype=np.float64)


def _boosted_levels(fit_table: np.ndarray, fit_lengths: np.ndarray, table: np.ndarray, tokens_out: int) -> np.ndarray:
    """(rows, LEVELS) quantiles of gradient boosting on what is left, in logarithms; made to rise."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    left = np.log(fit_lengths - tokens_out)
    columns = []
    for level in LEVELS:
        booster = HistGradientBoostingRegressor(
            loss="quantile", quantile=level, max_iter=150, learning_rate=0.05, min_samples_leaf=40, random_state=0
        )
        columns.append(np.exp(booster.fit(fit_table, left).predict(table)) + tokens_out)
    return np.maximum.accumulate(np.stack(columns, axis=1), axis=1)


def _figures(levels: np.ndarray, lengths: np.ndarray, cap_tokens: int | None) -> dict[str, float | None]:
    low, median, upper, high = (levels[:, LEVELS.index(level)] for level in (0.05, 0.5, COVERAGE, 0.95))
    return {
        "mae_tokens": float(np.abs(median - lengths).mean()),
        "coverage": share_covered(lengths, upper, cap_tokens),
        "over_reserved_tokens": float(np.maximum(upper - lengths, 0).mean()),
        "interval_width_tokens": float((high - low).mean()),
    }


def _replies(splits: Sequence[str]) -> dict[str, str]:
    """Row id -> text of the recorded reply."""
    return {
        f"{chat['root_id']}:{turn}": chat["messages"][turn]["content"]
        for name in splits
        for chat in read_json_lines(PREPARED_FOLDER / f"{name}.jsonl", "prepare")
        for turn in chat["replies"]
    }
