"""The evaluate stage: what it writes, and that it agrees with itself and with the exported model."""

from __future__ import annotations

import csv
import json
from typing import Any

import numpy as np
import pytest

from serving_plugin.predictor.metrics import score_split
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.rows import read_rows


def test_a_predictor_that_can_learn_beats_the_modal_bucket(trained: Any) -> None:
    for width in (100, 200, 400):
        assert trained.evaluation[f"accuracy_{width}"] > trained.evaluation[f"modal_accuracy_{width}"]
    assert trained.evaluation["mae_tokens"] < trained.evaluation["prior_median_mae_tokens"]
    assert trained.evaluation["auroc_heavy"] > 0.9


def test_metrics_file_is_flat_and_holds_what_was_returned(trained: Any) -> None:
    written = json.loads((trained.metrics / "evaluate.json").read_text())
    assert written == trained.evaluation
    assert not [name for name, value in written.items() if isinstance(value, dict | list)]


def test_confusion_table_gives_the_accuracy(trained: Any) -> None:
    with (trained.plots / "confusion.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == trained.evaluation["num_rows"]
    hits = sum(line["actual"] == line["predicted"] for line in lines)
    assert hits / len(lines) == pytest.approx(trained.evaluation["accuracy_200"], abs=1e-4)


def test_accuracy_table_has_both_models_at_every_granularity(trained: Any) -> None:
    with (trained.plots / "accuracy.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["granularity_tokens"], line["model"]) for line in lines] == [
        (width, model) for width in ("100", "200", "400") for model in ("predictor", "modal bucket")
    ]


def test_plot_is_a_picture(trained: Any) -> None:
    assert (trained.plots / "predicted_lengths.png").read_bytes().startswith(b"\x89PNG")


def test_exported_model_scores_the_same(trained: Any) -> None:
    predictor = LengthPredictor.load(str(trained.export))
    rows = read_rows(trained.labelled / "test.jsonl")
    probabilities = predictor.probabilities(predictor.encode([row.prompt for row in rows]))
    report = score_split(predictor.spec, np.asarray(probabilities), rows, num_resamples=0)
    for name, value in report.items():
        assert trained.evaluation[name] == pytest.approx(value, abs=2e-3), name
