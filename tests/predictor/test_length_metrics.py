"""Metrics against values worked by hand, against brute force and against the libraries' own."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import kendalltau
from sklearn.metrics import f1_score, roc_auc_score

from serving_plugin.core.forecast import LengthForecast
from serving_plugin.predictor.calibration import identity
from serving_plugin.predictor.conversation import FEATURE_NAMES, Message
from serving_plugin.predictor.encoding import InputRule
from serving_plugin.predictor.evaluation import resampled, summary
from serving_plugin.predictor.evaluation.bootstrap import bootstrap, paired_gain
from serving_plugin.predictor.evaluation.ceiling import resample_oracle
from serving_plugin.predictor.evaluation.metrics import (
    BucketAccuracy,
    HeavyDecodeAuroc,
    KendallTau,
    MeanAbsoluteErrorTokens,
    modal_bucket,
    score_split,
)
from serving_plugin.predictor.evaluation.resampled import Resamples
from serving_plugin.predictor.evaluation.scores import Forecasts, Truth, bucket_of, row_scores
from serving_plugin.predictor.rows import LabelledRow
from serving_plugin.predictor.spec import PredictorSpec

EDGES = (0, 100, 200, 300, 400)


def make_spec(**changes: Any) -> PredictorSpec:
    settings: dict[str, Any] = {
        "edges_tokens": EDGES, "granularity_tokens": 200, "target_model": "m", "backbone": "b",
        "input": InputRule(16, 2, 2, 0.5), "feature_names": FEATURE_NAMES, "pad_token_id": 0, "source": "recorded",
        "train_counts": (3, 1, 2, 4), "calibration": identity(),
    }  # fmt: skip
    return PredictorSpec(**{**settings, **changes})


SPEC = make_spec()


def rows(*lengths: int, censored: int = 0) -> list[LabelledRow]:
    """One conversation each; the first `censored` of them were cut."""
    message = (Message("user", "text"),)
    return [
        LabelledRow(f"{i}:1", f"root{i}", "recorded", message, length, i < censored) for i, length in enumerate(lengths)
    ]


def samples(*lengths_of_reply: tuple[int, ...], cap: int | None = None) -> list[LabelledRow]:
    """Several lengths of one reply after another."""
    message = (Message("user", "text"),)
    return [
        LabelledRow(f"{i}:1", f"root{i}", "generated", message, length, length == cap)
        for i, lengths in enumerate(lengths_of_reply)
        for length in lengths
    ]


def random_forecasts(num_rows: int, seed: int = 0, edges: tuple[int, ...] = (0, 7, 50, 100, 101, 260)) -> Forecasts:
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(edges) - 1) * 0.7, size=num_rows)
    weights[0, 0] = 0.0  # an impossible bucket
    return Forecasts.from_weights(edges, weights)


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
    expected = [LengthForecast(EDGES, tuple(row)).regrouped(width).probabilities for row in probabilities]
    np.testing.assert_allclose(Forecasts.from_weights(EDGES, probabilities).regrouped(width), expected)


def test_arrays_of_forecasts_agree_with_single_forecasts() -> None:
    many = random_forecasts(40)
    single = [LengthForecast(many.edges_tokens, tuple(row)) for row in many.probabilities.tolist()]
    for level in (0.0, 0.05, 0.5, 0.9, 0.99, 1.0):
        assert many.quantiles(level).tolist() == [one.quantile(level) for one in single]
    np.testing.assert_allclose(many.means(), [one.mean_tokens() for one in single])
    np.testing.assert_allclose(many.probability_over(60), [one.probability_over(60) for one in single])
    for cap in (3, 50, 60, 100, 258, 259, 400):
        clipped, expected = many.clipped(cap), [one.clipped(cap) for one in single]
        assert clipped.edges_tokens == expected[0].edges_tokens
        np.testing.assert_allclose(clipped.probabilities, [one.probabilities for one in expected], atol=1e-12)


@pytest.mark.parametrize("length", [0, 1, 6, 7, 55, 100, 259, 260, 300])
def test_crps_is_the_sum_over_tokens(length: int) -> None:
    many = random_forecasts(6, seed=1)
    tokens = np.arange(0, 400)
    low, width = np.asarray(many.edges_tokens[:-1]), np.diff(many.edges_tokens)
    reached = np.clip((tokens[:, None] - low + 1) / width, 0, 1)  # (tokens, buckets): share of a bucket up to there
    expected = [np.square(reached @ row - (tokens >= length)).sum() for row in many.probabilities]
    np.testing.assert_allclose(many.crps_tokens(np.full(6, length)), expected)


def test_crps_of_a_certain_length_is_the_absolute_error() -> None:
    certain = Forecasts.from_weights((0, 120, 121, 400), np.asarray([[0.0, 1.0, 0.0]] * 3))
    assert certain.crps_tokens(np.asarray([100, 120, 150])).tolist() == pytest.approx([20.0, 0.0, 30.0])


def test_probability_below_counts_tokens() -> None:
    one = Forecasts.from_weights((0, 10, 20), np.asarray([[0.4, 0.6]] * 4))
    assert one.below(np.asarray([0, 5, 10, 19])).tolist() == pytest.approx([0.0, 0.2, 0.4, 0.94])


def test_modal_bucket_depends_on_the_width() -> None:
    assert modal_bucket(SPEC, 100) == 3
    assert modal_bucket(SPEC, 200) == 1  # 4 against 6 rows
    assert modal_bucket(SPEC, 400) == 0
    assert modal_bucket(SPEC, 100, cap_tokens=250) == 2  # half of [200, 300) and all beyond lies in the cap's bucket


def test_split_scored_by_hand() -> None:
    certain = np.eye(4)
    # predicted buckets 0 1 2 3; true 0 0 2 1 at width 100, 0 0 1 0 at width 200
    report = score_split(SPEC, certain, rows(50, 99, 250, 150), num_resamples=0)
    assert report["num_rows"] == 4
    assert (report["num_censored"], report["cap_tokens"], report["cap_rate"]) == (0, None, 0.0)
    assert (report["accuracy_100"], report["accuracy_200"], report["accuracy_400"]) == (0.5, 0.75, 1.0)
    assert report["within_one_100"] == 0.75
    # F1 of the classes 0 .. 3 at width 100: 2/3, 0, 1, 0
    assert report["macro_f1_100"] == pytest.approx(5 / 12, abs=1e-4)
    assert report["modal_accuracy_100"] == 0.0
    assert report["modal_accuracy_200"] == 0.25
    assert report["gain_over_modal_200"] == 0.5
    assert report["mae_tokens"] == pytest.approx((1 + 50 + 1 + 199) / 4)  # medians 49, 149, 249, 349
    assert report["median_error_tokens"] == pytest.approx((1 + 50) / 2)
    assert report["kendall_tau"] == pytest.approx(4 / 6, abs=1e-4)
    assert report["auroc_heavy"] == 1.0  # the two longer than 128 tokens have the two highest scores
    assert report["coverage"] == 1.0  # quantiles 89, 189, 289, 389
    assert report["over_reserved_tokens"] == pytest.approx((39 + 90 + 39 + 239) / 4)
    assert report["interval_width_tokens"] == pytest.approx(90.0, abs=1.0)
    assert report["accuracy_200_low"] is None


def test_coverage_is_judged_where_the_quantile_lies_below_the_cap() -> None:
    """Lengths 150 (cut: no question), 20 (covered) and 95 (not); 90 % quantiles the cap, 89 and 89."""
    probabilities = np.asarray([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    report = score_split(SPEC, probabilities, rows(150, 20, 95, censored=1), num_resamples=0)
    assert report["coverage"] == 0.5
    assert report["coverage_judged"] == pytest.approx(2 / 3, abs=1e-4)


def test_censored_rows_count_in_the_bucket_of_the_cut() -> None:
    """All that a forecast says of lengths from the cap on is right for a row that was cut there."""
    probabilities = np.asarray([[0.3, 0.0, 0.3, 0.4], [0.3, 0.0, 0.3, 0.4], [0.6, 0.4, 0.0, 0.0]])
    report = score_split(
        SPEC, probabilities, rows(150, 20, 20, censored=1), num_resamples=0, granularities_tokens=[100]
    )
    assert (report["num_censored"], report["cap_tokens"], report["num_cut_early"]) == (1, 150, 0)
    # clipped at 150: [0, 100), [100, 150), 150 = 0.3, 0, 0.7 twice, then 0.6, 0.2, 0.2: buckets 1, 1, 0
    assert report["accuracy_100"] == pytest.approx(2 / 3, abs=1e-4)
    assert report["nll"] == pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.6)) / 3, abs=1e-4)
    # every 90 % quantile is the cap itself, where a reply is covered whatever it says: there is nothing to judge
    assert (report["coverage"], report["coverage_judged"]) == (None, 0.0)
    medians = np.asarray([150, 150, 83])
    assert report["mae_tokens"] == pytest.approx(np.mean([0, 130, medians[2] - 20]), abs=1e-4)
    assert summary.cut_replies(report).startswith("1 at 150 tokens (33.3%)")
    cut_early = rows(100, 150, 20, censored=2)
    assert score_split(SPEC, probabilities, cut_early, num_resamples=0)["num_cut_early"] == 1


def test_a_row_cut_below_whole_replies_is_no_cap() -> None:
    """Clipped at 20 tokens, every forecast would be right."""
    split = rows(20, 150, 250, 350, censored=1)
    truth = Truth.of(split)
    assert (truth.cap_tokens, truth.num_censored, truth.num_cut_early) == (None, 1, 1)
    assert truth.lengths_tokens.tolist() == [20, 150, 250, 350]
    report = score_split(SPEC, np.eye(4)[[0, 0, 0, 0]], split, num_resamples=0)
    assert (report["accuracy_100"], report["cap_tokens"], report["num_cut_early"]) == (0.25, None, 1)
    assert summary.cut_replies(report).startswith("1, below the length of whole ones")


def test_ece_of_a_known_miscalibration() -> None:
    """Every row says 0.9 for the first bucket; 60 % are there: the error is 0.3."""
    lengths = [50] * 60 + [250] * 40
    probabilities = np.tile([0.5, 0.4, 0.05, 0.05], (100, 1))
    report = score_split(SPEC, probabilities, rows(*lengths), num_resamples=20)
    assert report["ece"] == pytest.approx(0.3)
    assert report["ece_low"] < 0.3 < report["ece_high"]
    honest = np.tile([0.3, 0.3, 0.2, 0.2], (100, 1))
    compared = score_split(SPEC, probabilities, rows(*lengths), baselines={"honest": honest}, num_resamples=0)
    assert compared["baselines"]["honest"]["ece"] == pytest.approx(0.0, abs=1e-9)
    assert compared["baselines"]["honest"]["gain"]["ece"]["value"] == pytest.approx(-0.3)


def test_coverage_of_a_calibrated_forecast_is_the_nominal_one() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 400, size=20_000)
    everyone = Forecasts.from_weights(EDGES, np.ones((20_000, 4)))
    for level in (0.5, 0.8, 0.9):
        scores = row_scores(everyone, lengths, [200], level)
        assert scores["coverage"].mean() == pytest.approx(level, abs=0.01)
        assert scores["interval_coverage"].mean() == pytest.approx(level, abs=0.01)
        assert scores["interval_width_tokens"].mean() == pytest.approx(400 * level, abs=2)
        assert scores["over_reserved_tokens"].mean() == pytest.approx(400 * level**2 / 2, abs=3)


def test_over_reserved_at_coverage_compares_models_that_cover_differently() -> None:
    lengths = np.tile(np.arange(0, 100), 4)
    shy = Forecasts.from_weights(EDGES, np.tile([0.2, 0.2, 0.3, 0.3], (400, 1)))
    exact = Forecasts.from_weights(EDGES, np.tile([1.0, 0.0, 0.0, 0.0], (400, 1)))
    first, second = (row_scores(one, lengths, [200], 0.9) for one in (shy, exact))
    assert first["over_reserved_tokens"].mean() > 3 * second["over_reserved_tokens"].mean()
    drawn = Resamples([f"root{i}" for i in range(400)], 0, seed=0)
    (a,), (b,) = (resampled.over_reserved_at_coverage(drawn, one, lengths, 0.9) for one in (shy, exact))
    assert a == pytest.approx(b, abs=1.0)  # the same order of rows, so the same sharpness


def test_the_level_that_covers_as_asked_is_chosen_in_every_draw() -> None:
    """A level that stays the split's own would leave out how much it varies: the interval would be too narrow."""
    rng = np.random.default_rng(0)
    lengths, roots = rng.exponential(20, size=200).astype(np.int64), [f"root{i}" for i in range(200)]
    forecasts = Forecasts.from_weights((0, 400), np.ones((200, 1)))
    drawn = Resamples(roots, 200, seed=1)
    found = resampled.interval(resampled.over_reserved_at_coverage(drawn, forecasts, lengths, 0.9))
    upper = np.quantile(lengths, 0.9, method="higher")  # everyone's forecast is the same: the level is a length
    over = np.maximum(upper - lengths, 0)
    fixed = resampled.interval(resampled.means(drawn, over[:, None])[:, 0])
    assert found.value == fixed.value == over.mean()
    assert found.high - found.low > 2 * (fixed.high - fixed.low)


def test_statistics_of_all_draws_are_those_of_the_copied_rows() -> None:
    """Weights on rows give what scipy, scikit-learn and `bootstrap` give on rows drawn twice."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 30, size=300) + rng.random(300).round(1), rng.integers(0, 40, size=300)
    predicted, actual = rng.integers(0, 4, size=300), rng.integers(0, 5, size=300)
    roots = [f"root{i}" for i in rng.integers(0, 80, size=300)]
    drawn = Resamples(roots, 20, seed=7)
    forecasts = random_forecasts(300)
    below = forecasts.below(y)

    def over_reserved(chosen: np.ndarray) -> float:
        level = np.quantile(below[chosen], 0.8, method="higher") + 1e-7
        return float(np.maximum(forecasts.quantiles(min(1.0, level)) - y, 0)[chosen].mean())

    checks = [
        (resampled.over_reserved_at_coverage(drawn, forecasts, y, 0.8), over_reserved),
        (resampled.means(drawn, x[:, None])[:, 0], lambda chosen: float(x[chosen].mean())),
        (resampled.median(drawn, x), lambda chosen: float(np.median(x[chosen]))),
        (resampled.kendall_tau(drawn, x, y), lambda chosen: float(kendalltau(x[chosen], y[chosen]).statistic)),
        (resampled.auroc(drawn, x, y > 20), lambda chosen: float(roc_auc_score(y[chosen] > 20, x[chosen]))),
        (
            resampled.macro_f1(drawn, predicted, actual),
            lambda chosen: float(f1_score(actual[chosen], predicted[chosen], average="macro", zero_division=0)),
        ),
    ]
    for draws, statistic in checks:
        expected = bootstrap(statistic, roots, 20, seed=7)
        found = resampled.interval(draws)
        assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))


def test_gains_are_positive_where_the_predictor_is_better() -> None:
    lengths = [50, 150, 250, 350] * 20
    split = rows(*lengths)
    good = np.eye(4)[[length // 100 for length in lengths]] * 0.9 + 0.025
    blind = np.tile([0.3, 0.1, 0.2, 0.4], (80, 1)) + np.random.default_rng(0).random((80, 4)) * 0.05
    report = score_split(SPEC, good, split, baselines={"blind": blind}, num_resamples=100, seed=1)
    assert set(report["baselines"]) == {"modal", "marginal", "blind"}
    gain = report["baselines"]["blind"]["gain"]
    for name in ("accuracy_100", "accuracy_200", "within_one_100", "macro_f1_200", "kendall_tau", "auroc_heavy",
                 "mae_tokens", "median_error_tokens", "crps_tokens", "nll", "over_reserved_at_coverage_tokens",
                 "interval_width_tokens"):  # fmt: skip
        assert 0 < gain[name]["low"] <= gain[name]["value"] <= gain[name]["high"], name
    assert report["baselines"]["marginal"]["kendall_tau"] is None  # the same score for all: no rank
    assert report["baselines"]["modal"]["gain"]["accuracy_200"] == {
        "value": report["gain_over_modal_200"],
        "low": report["gain_over_modal_200_low"],
        "high": report["gain_over_modal_200_high"],
    }
    swapped = score_split(SPEC, blind, split, baselines={"good": good}, num_resamples=100, seed=1)
    assert swapped["baselines"]["good"]["gain"]["mae_tokens"]["value"] == -gain["mae_tokens"]["value"]


def test_gain_of_a_mean_is_the_paired_bootstrap_s() -> None:
    rng = np.random.default_rng(5)
    split = rows(*rng.integers(0, 400, size=60).tolist())
    ours, theirs = rng.dirichlet(np.ones(4), size=60), rng.dirichlet(np.ones(4), size=60)
    gain = score_split(SPEC, ours, split, baselines={"b": theirs}, num_resamples=50, seed=2)["baselines"]["b"]["gain"]
    truth = Truth.of(split)
    a, b = (row_scores(truth.forecasts(EDGES, one), truth.lengths_tokens, [200], 0.9) for one in (ours, theirs))
    expected = paired_gain(a["accuracy_200"], b["accuracy_200"], truth.roots, 50, 2)
    assert gain["accuracy_200"] == expected.to_plain()


def test_intervals_hold_the_value_and_repeat_by_seed() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(4), size=80)
    split = rows(*rng.integers(0, 400, size=80).tolist())
    first = score_split(SPEC, probabilities, split, num_resamples=100, seed=3)
    assert first == score_split(SPEC, probabilities, split, num_resamples=100, seed=3)
    for name in ("accuracy_200", "mae_tokens", "kendall_tau", "auroc_heavy", "crps_tokens", "macro_f1_200"):
        assert first[f"{name}_low"] < first[name] < first[f"{name}_high"]


def test_what_a_split_cannot_define_is_none_not_nan() -> None:
    report = score_split(SPEC, np.eye(4), rows(64, 64, 64, 64), num_resamples=5)
    assert report["kendall_tau"] is None
    assert report["auroc_heavy"] is None
    assert report["auroc_heavy_low"] is None


def test_resample_oracle_by_hand() -> None:
    split = samples((50, 150), (250, 260), (390, 390))
    report = resample_oracle(split)
    assert report is not None
    assert (report["num_replies"], report["num_samples"]) == (3, 6)
    assert report["accuracy_100"] == pytest.approx(2 / 3, abs=1e-4)
    assert report["accuracy_200"] == 1.0
    assert report["mae_tokens"] == pytest.approx((100 + 10 + 0) / 3, abs=1e-4)
    assert report["kendall_tau"] == 1.0
    assert report["accuracy_100_low"] is None
    probabilities = np.eye(4)[[0, 0, 2, 2, 0, 0]]
    once = replace(rows(10)[0], id="once")
    beside = resample_oracle([*split, once], predictor=(SPEC, np.vstack([probabilities, np.eye(4)[:1]])))
    assert beside is not None
    assert beside["predictor"]["num_rows"] == 6  # the reply with one sample is left out
    assert beside["predictor"]["accuracy_200"] == pytest.approx(4 / 6, abs=1e-4)
    bounded = resample_oracle(split, num_resamples=50)
    assert bounded is not None
    assert bounded["accuracy_100_low"] <= report["accuracy_100"] <= bounded["accuracy_100_high"]


def test_resample_oracle_of_unequal_counts_and_cut_replies() -> None:
    report = resample_oracle(samples((100, 200, 300), (20, 300), (40,), cap=300), granularities_tokens=[100])
    assert report is not None
    assert (report["num_replies"], report["num_samples"]) == (2, 5)
    assert report["mae_tokens"] == pytest.approx((2 * (100 + 200 + 100) + 2 * 280) / 8)
    assert report["accuracy_100"] == 0.0


def test_resample_oracle_needs_repeats() -> None:
    assert resample_oracle(samples((1,), (2,))) is None


def test_thousand_draws_take_seconds() -> None:
    rng = np.random.default_rng(0)
    split = rows(*rng.integers(0, 400, size=1500).tolist())
    started = time.process_time()
    score_split(SPEC, rng.dirichlet(np.ones(4), size=1500), split, num_resamples=1000)
    assert time.process_time() - started < 60
