"""Metrics against values worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serving_plugin.core.forecast import LengthForecast
from serving_plugin.predictor.metrics import (
    BucketAccuracy,
    HeavyDecodeAuroc,
    KendallTau,
    MeanAbsoluteErrorTokens,
    bucket_of,
    modal_bucket,
    regroup,
    score_split,
)
from serving_plugin.predictor.rows import LabelledRow
from serving_plugin.predictor.spec import PredictorSpec

SPEC = PredictorSpec(
    edges_tokens=(0, 100, 200, 300, 400),
    granularity_tokens=200,
    target_model="m",
    backbone="b",
    head_tokens=1,
    tail_tokens=1,
    max_input_tokens=4,
    pad_token_id=0,
    source="recorded",
    train_counts=(3, 1, 2, 4),
)


def rows(*lengths: int, censored: int = 0) -> list[LabelledRow]:
    return [
        LabelledRow(str(i), f"root{i}", "recorded", "text", length, i < censored) for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("metric", "predictions", "references", "expected"),
    [
        (BucketAccuracy(), [0, 1, 2, 2], [0, 1, 1, 0], {"accuracy": 0.5}),
        (MeanAbsoluteErrorTokens(), [10.0, 20.0, 30.0], [13.0, 20.0, 24.0], {"mae_tokens": 3.0}),
        (KendallTau(), [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0], {"kendall_tau": 4 / 6}),  # five pairs of six agree
        (HeavyDecodeAuroc(), [0.1, 0.4, 0.35, 0.8], [0.0, 0.0, 1.0, 1.0], {"auroc_heavy": 0.75}),
    ],
)
def test_metric_by_hand(metric: object, predictions: list[float], references: list[float], expected: dict) -> None:
    assert metric.compute(predictions=predictions, references=references) == pytest.approx(expected)  # type: ignore[attr-defined]


def test_auroc_of_one_class_is_undefined() -> None:
    assert math.isnan(HeavyDecodeAuroc().compute(predictions=[0.1, 0.2], references=[1.0, 1.0])["auroc_heavy"])


def test_lengths_beyond_the_last_bucket_count_in_it() -> None:
    assert bucket_of(np.asarray([0, 199, 200, 5000]), 200, 2).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("width", [50, 100, 150, 200, 400, 1000])
def test_regroup_is_the_forecast_s_own(width: int) -> None:
    probabilities = np.asarray([[0.1, 0.2, 0.3, 0.4], [0.7, 0.0, 0.0, 0.3]])
    expected = [LengthForecast(SPEC.edges_tokens, tuple(row)).regrouped(width).probabilities for row in probabilities]
    np.testing.assert_allclose(regroup(SPEC.edges_tokens, probabilities, width), expected)


def test_modal_bucket_depends_on_the_width() -> None:
    assert modal_bucket(SPEC, 100) == 3
    assert modal_bucket(SPEC, 200) == 1  # 4 against 6 rows
    assert modal_bucket(SPEC, 400) == 0


def test_split_scored_by_hand() -> None:
    certain = np.eye(4)
    # predicted buckets 0 1 2 3; true 0 0 2 1 at width 100, 0 0 1 0 at width 200
    report = score_split(SPEC, certain, rows(50, 99, 250, 150, censored=1), num_resamples=0)
    assert report["num_rows"] == 4
    assert report["num_censored"] == 1
    assert report["accuracy_100"] == 0.5
    assert report["accuracy_200"] == 0.75
    assert report["accuracy_400"] == 1.0
    assert report["modal_accuracy_100"] == 0.0
    assert report["modal_accuracy_200"] == 0.25
    assert report["gain_over_modal_200"] == 0.5
    assert report["mae_tokens"] == pytest.approx((1 + 50 + 1 + 199) / 4)  # medians 49, 149, 249, 349
    assert report["kendall_tau"] == pytest.approx(4 / 6, abs=1e-4)
    assert report["auroc_heavy"] == 1.0  # the two longer than 128 tokens have the two highest scores


def test_intervals_hold_the_value_and_repeat_by_seed() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(4), size=80)
    split = rows(*rng.integers(0, 400, size=80).tolist())
    first = score_split(SPEC, probabilities, split, num_resamples=100, seed=3)
    assert first == score_split(SPEC, probabilities, split, num_resamples=100, seed=3)
    for name in ("accuracy_200", "mae_tokens", "kendall_tau", "auroc_heavy"):
        assert first[f"{name}_low"] < first[name] < first[f"{name}_high"]


def test_what_a_split_cannot_define_is_none_not_nan() -> None:
    report = score_split(SPEC, np.eye(4), rows(64, 64, 64, 64), num_resamples=5)
    assert report["kendall_tau"] is None
    assert report["auroc_heavy"] is None
    assert report["auroc_heavy_low"] is None
