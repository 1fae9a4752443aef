"""Scores of a predictor on another source's replies: known answers."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from benchmarks.transfer import TransferResult, score
from serving_plugin.predictor.conversation import Message
from serving_plugin.predictor.evaluation.scores import Forecasts, Truth
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
    found = score(right, None, Truth.of(rows()))
    assert found["accuracy"] == 1.0
    assert found["auroc_heavy"]["value"] == 1.0
    assert found["kendall_tau"]["value"] > 0.7
    assert "accuracy_difference" not in found
    mirrored = score(wrong, right, Truth.of(rows()))
    assert mirrored["accuracy"] == 0.0
    assert mirrored["auroc_heavy"]["value"] == 0.0
    assert mirrored["accuracy_difference"] == {"value": -1.0, "low": -1.0, "high": -1.0}
    assert mirrored["crps_tokens_difference"]["low"] > 0


def test_one_forecast_for_everyone_has_no_rank_correlation() -> None:
    found = score(Forecasts.from_weights(EDGES, np.ones((len(LENGTHS), 3))), None, Truth.of(rows()))
    assert found["kendall_tau"] == {"value": None, "low": None, "high": None}
    assert found["auroc_heavy"]["value"] == 0.5


def test_what_is_undefined_is_a_dash_in_the_table() -> None:
    """No reply is heavy, so that there is no AUROC."""
    truth = Truth.of([replace(row, output_tokens=10 + i) for i, row in enumerate(rows())])
    found = score(sure_of([0, 1, 0, 1, 0, 1]), None, truth)
    assert found["auroc_heavy"] == {"value": None, "low": None, "high": None}
    cell = {"trained_on": "recorded", "tested_on": "recorded", **found}
    console = Console(width=140, record=True, file=StringIO())
    for table in TransferResult(extent={"max_tokens": 64}, params={}, cells=[cell]).tables():
        console.print(table)
    (line,) = [line for line in console.export_text().splitlines() if "recorded" in line]
    assert [part.strip() for part in line.split("│")][6] == "-"


def test_forecasts_are_ranked_as_they_are_scored_under_the_cap() -> None:
    """Beyond the cap two forecasts are the same, whatever they say of longer replies."""
    cut = Truth.of([replace(row, output_tokens=min(row.output_tokens, 100), censored=True) for row in rows()])
    weights = np.eye(3)[[0, 1, 0, 2, 1, 0]]
    found = score(cut.forecasts(EDGES, weights), None, cut)
    assert found["auroc_heavy"]["value"] is None
    assert found["kendall_tau"]["value"] == pytest.approx(
        score(cut.forecasts(EDGES, weights[:, [0, 2, 1]]), None, cut)["kendall_tau"]["value"]
    )
