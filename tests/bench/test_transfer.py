"""Scores of a predictor on another source's replies: known answers."""

from __future__ import annotations

import numpy as np

from benchmarks.transfer import score
from serving_plugin.predictor.conversation import Message
from serving_plugin.predictor.evaluation.scores import Forecasts
from serving_plugin.predictor.rows import LabelledRow

EDGES = (0, 100, 200, 300)
LENGTHS = (20, 150, 30, 180, 150, 10)


def rows() -> list[LabelledRow]:
    question = (Message("user", "why?"),)
    return [LabelledRow(f"{i}:1", str(i), "recorded", question, n, False) for i, n in enumerate(LENGTHS)]


def sure_of(buckets: list[int]) -> Forecasts:
    return Forecasts.from_weights(EDGES, np.eye(3)[buckets] + 1e-3)


def test_a_predictor_that_is_right_and_its_mirror_image() -> None:
    truth = [n // 100 for n in LENGTHS]
    right, wrong = sure_of(truth), sure_of([1 - bucket for bucket in truth])
    found = score(right, None, rows(), 256)
    assert found["accuracy"] == 1.0
    assert found["auroc_heavy"]["value"] == 1.0
    assert found["kendall_tau"]["value"] > 0.7
    assert "accuracy_difference" not in found
    mirrored = score(wrong, right, rows(), 256)
    assert mirrored["accuracy"] == 0.0
    assert mirrored["auroc_heavy"]["value"] == 0.0
    assert mirrored["accuracy_difference"] == {"value": -1.0, "low": -1.0, "high": -1.0}
    assert mirrored["crps_tokens_difference"]["low"] > 0


def test_one_forecast_for_everyone_has_no_rank_correlation() -> None:
    found = score(Forecasts.from_weights(EDGES, np.ones((len(LENGTHS), 3))), None, rows(), 256)
    assert found["kendall_tau"] is None
    assert found["auroc_heavy"]["value"] == 0.5
