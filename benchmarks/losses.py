"""`losses`: what each option of the predictor's training adds, on the same rows and seeds.

Every variant changes one thing against `all`; differences are paired by conversation (95 % bootstrap bounds, rows
averaged over seeds; the rank correlation has none). Scores are of the *validation* split, since nothing is tuned on the
test split. Needs data/labelled of the active profile (`dvc repro label`). `--short` shows that it works.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from scipy.stats import kendalltau

from benchmarks.record import Record, deliver, say
from pipeline.label import LABELLED_FOLDER
from pipeline.params import Params, load_params
from pipeline.train import choose_rows, fit
from serving_plugin.predictor.evaluation.bootstrap import paired_gain
from serving_plugin.predictor.evaluation.scores import Forecasts, Truth, row_scores
from serving_plugin.predictor.rows import LabelledRow, read_rows

SCORES = ("accuracy_200", "kendall_tau", "nll", "crps_tokens", "mae_tokens")
COVERAGE = 0.9
NUM_RESAMPLES = 1000

# Changes of sections of params.yaml, by variant.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "all": {},
    "hard labels": {"train": {"label_smoothing_tokens": 0.0}},
    "no expected value": {"train": {"expected_value_weight": 0.0}},
    "plain cross-entropy": {"train": {"label_smoothing_tokens": 0.0, "expected_value_weight": 0.0}},
    "no warm-up of the head": {"train": {"head_epochs": 0}},
    "head dropout 0.1": {"train": {"head_dropout": 0.1}},
    "no lengths as features": {"train": {"use_features": False}},
    "last message only": {"input": {"opening_tokens": 0, "reply_tokens": 0}, "train": {"use_features": False}},
}


__all__ = ["deliver", "run"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is trained; `num_rows` training rows and as many epochs for each variant and seed."""

    num_rows: int = 4000
    num_validation_rows: int = 3000
    epochs: float = 1.0
    seeds: tuple[int, ...] = (0, 1)


SHORT = Extent(num_rows=200, num_validation_rows=100, seeds=(0,))


@dataclass(slots=True, kw_only=True)
class LossesResult(Record):
    """Scores by variant and seed."""

    extent: dict[str, Any]
    params: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether anything was measured."""
        return bool(self.runs)

    def tables(self) -> Iterator[Table]:
        """One table for the console."""
        table = Table(title=f"{self.extent['num_rows']} training rows, validation split; difference to `all`")
        for column in ("variant", "seeds", *SCORES):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for variant in dict.fromkeys(run["variant"] for run in self.runs):
            runs = [run for run in self.runs if run["variant"] == variant]
            cells = [f"{np.mean([run['scores'][name] for run in runs]):.4g}" for name in SCORES]
            differences = self.differences.get(variant, {})
            for i, name in enumerate(SCORES):
                if name in differences:
                    found = differences[name]
                    cells[i] += f" ({found['value']:+.2g} [{found['low']:+.2g}, {found['high']:+.2g}])"
            table.add_row(variant, str(len(runs)), *cells)
        yield table


def run(is_short: bool) -> LossesResult:
    """Train every variant on this machine, seeds outermost, so that drift of the machine touches all alike."""
    params, extent = load_params(), SHORT if is_short else Extent()
    train_rows, held_out = chosen_rows(params, extent)
    truth = Truth.of(held_out)
    result = LossesResult(
        extent=asdict(extent),
        params={name: params.to_plain()[name] for name in ("label", "input", "train")},
    )
    by_row: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in VARIANTS}
    for seed in extent.seeds:
        for name, changes in VARIANTS.items():
            began = time.perf_counter()
            forecasts = train_variant(params, extent, seed, changes, train_rows, held_out)
            seconds = time.perf_counter() - began
            by_row[name].append(_by_row(forecasts, truth))
            figures = scores_of(forecasts, truth)
            result.runs.append({"variant": name, "seed": seed, "seconds": round(seconds, 1), "scores": figures})
            shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            say(f"{name}, seed {seed}, {seconds:.0f} s: {shown}")
    for name, found in by_row.items():
        if name != "all":
            result.differences[name] = {
                key: paired_gain(_mean(found, key), _mean(by_row["all"], key), truth.roots, NUM_RESAMPLES, 0).to_plain()
                for key in found[0]
            }
    return result


def chosen_rows(params: Params, extent: Extent) -> tuple[list[LabelledRow], list[LabelledRow]]:
    """Training rows and held-out rows, of the validation split: nothing is tuned on the test split."""
    train_rows = choose_rows(
        read_rows(LABELLED_FOLDER / "train.jsonl"),
        params.seed,
        max_rows=extent.num_rows,
        max_turns=params.train.max_turns_per_conversation,
    )
    held_out = choose_rows(
        read_rows(LABELLED_FOLDER / "validation.jsonl"), params.seed, max_rows=extent.num_validation_rows
    )
    return train_rows, held_out


def scores_of(forecasts: Forecasts, truth: Truth) -> dict[str, float]:
    """`SCORES` of the split."""
    figures = {key: float(np.mean(values)) for key, values in _by_row(forecasts, truth).items()}
    return figures | {"kendall_tau": float(kendalltau(forecasts.means(), truth.lengths_tokens).statistic)}


def _by_row(forecasts: Forecasts, truth: Truth) -> dict[str, np.ndarray]:
    scores = row_scores(forecasts, truth.lengths_tokens, (200,), COVERAGE)
    return {key: scores[key].astype(np.float64) for key in SCORES if key in scores}


def _mean(by_seed: list[dict[str, np.ndarray]], key: str) -> np.ndarray:
    """(rows,) score of each row, averaged over the seeds."""
    mean: np.ndarray = np.mean([scores[key] for scores in by_seed], axis=0)
    return mean


def train_variant(
    params: Params,
    extent: Extent,
    seed: int,
    changes: dict[str, dict[str, Any]],
    train_rows: list[LabelledRow],
    held_out: list[LabelledRow],
) -> Forecasts:
    """Forecasts of the held-out rows by one variant; with one epoch there is nothing to choose by validation."""
    settings = replace(params.train, epochs=extent.epochs, max_validation_rows=200)
    changed = replace(params, seed=seed, train=replace(settings, **changes.get("train", {})))
    changed = replace(changed, input=replace(changed.input, **changes.get("input", {})))
    with tempfile.TemporaryDirectory(prefix="tetri-losses-") as scratch:
        fitted = fit(changed, train_rows, held_out, Path(scratch))
    return Truth.of(held_out).forecasts(fitted.spec.edges_tokens, fitted.probabilities(held_out))
