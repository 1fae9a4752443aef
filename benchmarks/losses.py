"""`losses`: what each option of the predictor's training adds, on the same rows and seeds.

Every variant changes one thing against `all`. Scores are of the *validation* split: the test split is not tuned on.
Needs data/labelled of the active profile (`dvc repro label`). `--short` shows that it works.
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

from benchmarks.record import Record, deliver, say
from pipeline.calibrate import softmax
from pipeline.label import LABELLED_FOLDER
from pipeline.network import predict_logits
from pipeline.params import Params, load_params
from pipeline.train import choose_rows, fit
from serving_plugin.predictor.evaluation.scores import Forecasts, row_scores
from serving_plugin.predictor.rows import LabelledRow, read_rows

# Changes of sections of params.yaml, by variant.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "all": {},
    "hard labels": {"train": {"label_smoothing_tokens": 0.0}},
    "no expected value": {"train": {"expected_value_weight": 0.0}},
    "no ranking": {"train": {"ranking_weight": 0.0}},
    "plain cross-entropy": {
        "train": {"label_smoothing_tokens": 0.0, "expected_value_weight": 0.0, "ranking_weight": 0.0}
    },
    "no warm-up of the head": {"train": {"head_epochs": 0}},
    "no lengths as features": {"train": {"use_features": False}},
    "last message only": {"input": {"opening_tokens": 0, "reply_tokens": 0}, "train": {"use_features": False}},
}


__all__ = ["deliver", "run"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is trained; `num_rows` training rows and as many epochs for each variant and seed."""

    num_rows: int = 6000
    num_validation_rows: int = 3000
    epochs: float = 1.0
    seeds: tuple[int, ...] = (0,)


SHORT = Extent(num_rows=200, num_validation_rows=100)


@dataclass(slots=True, kw_only=True)
class LossesResult(Record):
    """Scores by variant and seed."""

    extent: dict[str, Any]
    params: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether anything was measured."""
        return bool(self.runs)

    def tables(self) -> Iterator[Table]:
        """One table for the console."""
        table = Table(title=f"{self.extent['num_rows']} training rows, validation split; difference to `all`")
        names = ("accuracy_200", "kendall_tau", "nll", "crps_tokens", "mae_tokens")
        for column in ("variant", "seeds", *names):
            table.add_column(column, justify="left" if column == "variant" else "right")
        means = {
            variant: {name: float(np.mean([run["scores"][name] for run in self.runs if run["variant"] == variant]))
                      for name in names}
            for variant in dict.fromkeys(run["variant"] for run in self.runs)
        }  # fmt: skip
        for variant, scores in means.items():
            num_seeds = sum(run["variant"] == variant for run in self.runs)
            cells = [
                f"{scores[name]:.4g}"
                if variant == "all"
                else f"{scores[name]:.4g} ({scores[name] - means['all'][name]:+.3g})"
                for name in names
            ]
            table.add_row(variant, str(num_seeds), *cells)
        yield table


def run(model: Path, source: str, is_short: bool) -> LossesResult:
    """Train every variant on this machine, seeds outermost, so that drift of the machine touches all alike."""
    params, extent = load_params(), SHORT if is_short else Extent()
    train_rows = choose_rows(
        read_rows(LABELLED_FOLDER / "train.jsonl"), params.train, params.seed, max_rows=extent.num_rows
    )
    held_out = choose_rows(
        read_rows(LABELLED_FOLDER / "validation.jsonl"),
        params.train,
        params.seed,
        max_rows=extent.num_validation_rows,
        max_turns=None,
    )
    result = LossesResult(
        extent=asdict(extent),
        params={name: params.to_plain()[name] for name in ("label", "input", "train")},
    )
    for seed in extent.seeds:
        for name, changes in VARIANTS.items():
            began = time.perf_counter()
            scores = train_variant(params, extent, seed, changes, train_rows, held_out)
            seconds = time.perf_counter() - began
            result.runs.append({"variant": name, "seed": seed, "seconds": round(seconds, 1), "scores": scores})
            shown = ", ".join(f"{key} {value:.4g}" for key, value in scores.items())
            say(f"{name}, seed {seed}, {seconds:.0f} s: {shown}")
    return result


def train_variant(
    params: Params,
    extent: Extent,
    seed: int,
    changes: dict[str, dict[str, Any]],
    train_rows: list[LabelledRow],
    held_out: list[LabelledRow],
) -> dict[str, float]:
    """Scores of one variant; the last epoch's weights count, since one epoch leaves nothing to choose."""
    settings = replace(params.train, epochs=extent.epochs, max_validation_rows=200)
    changed = replace(params, seed=seed, train=replace(settings, **changes.get("train", {})))
    changed = replace(changed, input=replace(changed.input, **changes.get("input", {})))
    with tempfile.TemporaryDirectory(prefix="tetri-losses-") as scratch:
        fitted = fit(changed, train_rows, held_out, Path(scratch))
    encoded = [fitted.encoder.encode(row.messages) for row in held_out]
    shares = softmax(predict_logits(fitted.network, encoded, fitted.spec.pad_token_id))
    forecasts = Forecasts.from_weights(fitted.spec.edges_tokens, shares)
    lengths = np.asarray([row.output_tokens for row in held_out])
    scores = row_scores(forecasts, lengths, (200,), 0.9)
    from scipy.stats import kendalltau

    return {
        "accuracy_200": float(scores["accuracy_200"].mean()),
        "kendall_tau": float(kendalltau(forecasts.means(), lengths).statistic),
        "nll": float(scores["nll"].mean()),
        "crps_tokens": float(scores["crps_tokens"].mean()),
        "mae_tokens": float(scores["mae_tokens"].mean()),
    }
