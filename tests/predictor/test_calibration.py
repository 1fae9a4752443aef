"""Calibration on data whose true distribution is known: distort the forecast, and see whether it is put right."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from serving_plugin.core.forecast import LengthForecast
from serving_plugin.predictor.calibration import (
    MIN_GROUP_ROWS,
    NUM_KNOTS,
    Array,
    Recalibration,
    conformal_knots,
    fit_recalibration,
    fit_temperature,
    group_of,
    identity,
    num_groups,
    pit_values,
)

WIDTH = 50
NUM_BUCKETS = 20
EDGES = tuple(range(0, WIDTH * NUM_BUCKETS + 1, WIDTH))
LEVELS = np.linspace(0.05, 0.95, 19)
GRID = np.linspace(0.0, 1.0, NUM_KNOTS + 1)


def softmax(logits: Array) -> Array:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def draw(rng: np.random.Generator, num_rows: int) -> tuple[Array, Array]:
    """(rows, buckets) true logits, wide bumps here and there, and lengths drawn from them."""
    centres = rng.uniform(2, NUM_BUCKETS - 2, (num_rows, 1))
    logits = -0.5 * ((np.arange(NUM_BUCKETS) - centres) / 3.0) ** 2
    buckets = (softmax(logits).cumsum(axis=1) < rng.random((num_rows, 1))).sum(axis=1)
    return logits, np.minimum(buckets, NUM_BUCKETS - 1) * WIDTH + rng.integers(0, WIDTH, num_rows)


def tilt(strength: float) -> Array:
    """Logits that push a forecast towards longer replies, or shorter ones when negative."""
    return strength * np.linspace(-1, 1, NUM_BUCKETS)


# How forecasts are wrong, by group
DISTORTIONS = (
    lambda logits: 4.0 * logits,
    lambda logits: 0.3 * logits,
    lambda logits: logits + tilt(6.0),
    lambda logits: logits + tilt(-6.0),
)


def coverage(probabilities: Array, lengths: Array) -> Array:
    """Share of rows at or below the forecast's quantile, at each of LEVELS."""
    return np.mean(pit_values(EDGES, probabilities, lengths)[:, None] <= LEVELS, axis=0)


def sampling_error(num_fitted: int, num_fresh: int) -> Array:
    """Four standard deviations of coverage on fresh rows, and a knot's step for reading between knots."""
    return 4 * np.sqrt(LEVELS * (1 - LEVELS) * (1 / num_fitted + 1 / num_fresh)) + 0.5 / NUM_KNOTS


@pytest.mark.parametrize("distort", DISTORTIONS, ids=["sharp", "blunt", "long", "short"])
def test_coverage_on_fresh_rows_is_nominal_at_every_level(distort: Any) -> None:
    rng = np.random.default_rng(1)
    logits, lengths = draw(rng, 4000)
    pits = pit_values(EDGES, softmax(distort(logits)), lengths)
    nobody = np.zeros(4000, dtype=bool)
    fitted = fit_recalibration(1.0, (), pits, nobody, np.zeros(4000, dtype=np.int64))
    fresh_logits, fresh = draw(rng, 4000)
    before = softmax(distort(fresh_logits))
    after = fitted.apply(before, np.zeros(4000, dtype=np.int64))
    error = sampling_error(4000, 4000)
    assert np.all(np.abs(coverage(after, fresh) - LEVELS) <= error)
    assert np.max(np.abs(coverage(before, fresh) - LEVELS) - error) > 0.05
    # what serving reads off it: whole tokens
    forecasts = [LengthForecast.from_weights(EDGES, row.tolist()) for row in after]
    for level in (0.5, 0.9, 0.95):
        covered = np.mean([length <= one.quantile(level) for length, one in zip(fresh, forecasts, strict=True)])
        assert covered == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / 2000) + 0.01)


def test_coverage_holds_within_every_group() -> None:
    rng = np.random.default_rng(2)
    num_rows, num_kinds = 2000, len(DISTORTIONS)

    def rows() -> tuple[Array, Array, Array]:
        parts = [draw(rng, num_rows) for _ in range(num_kinds)]
        shares = [softmax(distort(logits)) for distort, (logits, _) in zip(DISTORTIONS, parts, strict=True)]
        groups = np.repeat(np.arange(num_kinds), num_rows)
        return np.concatenate(shares), np.concatenate([lengths for _, lengths in parts]), groups

    shares, lengths, groups = rows()
    nobody = np.zeros(len(groups), dtype=bool)
    pits = pit_values(EDGES, shares, lengths)
    by_group = fit_recalibration(1.0, (64,), pits, nobody, groups)  # two lengths x two roles
    pooled = Recalibration(1.0, (64,), (tuple(conformal_knots(pits, nobody).tolist()),) * num_kinds)
    shares, lengths, groups = rows()
    order = rng.permutation(len(groups))  # groups come mixed
    shares, lengths, groups = shares[order], lengths[order], groups[order]
    calibrated, together = by_group.apply(shares, groups), pooled.apply(shares, groups)
    error = sampling_error(num_rows, num_rows)
    for group in range(num_kinds):
        own = groups == group
        assert np.all(np.abs(coverage(calibrated[own], lengths[own]) - LEVELS) <= error), group
        if group >= 2:  # too long and too short: wrong in opposite ways, which one map for all cannot put right
            assert np.max(np.abs(coverage(together[own], lengths[own]) - LEVELS)) > 0.1, group


@pytest.mark.parametrize("num_rows", [9, 19, 50])
def test_small_samples_cover_what_conformal_theory_says(num_rows: int) -> None:
    """E[coverage] at level a is ceil((n + 1) a) / (n + 1): never below a, above it by less than 1 / (n + 1)."""
    rng = np.random.default_rng(3)
    nobody = np.zeros(num_rows, dtype=bool)
    # PITs of a bad forecast: u ** 2 with u uniform, so a new one is at or below k with probability sqrt(k)
    covered = np.mean([np.sqrt(conformal_knots(rng.random(num_rows) ** 2, nobody)) for _ in range(3000)], axis=0)
    expected = np.minimum(np.ceil((num_rows + 1) * GRID - 1e-9) / (num_rows + 1), 1.0)
    error = 4 * np.sqrt(expected * (1 - expected) / (num_rows + 2) / 3000)
    assert np.all(np.abs(covered - expected) <= error + 1e-6)
    assert np.all(covered >= GRID - error - 1e-6)


def test_a_level_that_so_few_rows_cannot_promise_is_the_longest_length() -> None:
    knots = conformal_knots(np.linspace(0.1, 0.5, 9), np.zeros(9, dtype=bool))
    assert knots[90] == pytest.approx(0.5)  # rank 9 of 9
    assert knots[91] == pytest.approx(1.0)  # would be rank 10


# Temperature


def one_hot(lengths: Array) -> Array:
    return np.arange(NUM_BUCKETS) == (lengths // WIDTH)[:, None]


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.7, 3.0])
@pytest.mark.parametrize("censor", [False, True])
def test_temperature_finds_the_scale_of_the_logits(scale: float, censor: bool) -> None:
    rng = np.random.default_rng(4)
    logits, lengths = draw(rng, 6000)
    allowed = one_hot(lengths)
    if censor:
        cut = rng.integers(0, EDGES[-1], 6000)
        from_the_cut = np.arange(NUM_BUCKETS) >= (cut // WIDTH)[:, None]
        is_cut = cut // WIDTH <= lengths // WIDTH
        assert 0.3 < is_cut.mean() < 0.7
        allowed = np.where(is_cut[:, None], from_the_cut, allowed)
    found = fit_temperature(scale * logits + 7.0, allowed)
    assert found == pytest.approx(scale, rel=0.12 if censor else 0.08)


@pytest.mark.parametrize(("scale", "bound"), [(0.01, 0.25), (40.0, 4.0)])
def test_temperature_stays_within_its_bounds(scale: float, bound: float) -> None:
    logits, lengths = draw(np.random.default_rng(5), 500)
    assert fit_temperature(scale * logits, one_hot(lengths)) == pytest.approx(bound, rel=0.01)


def test_temperature_of_impossible_rows_is_a_number() -> None:
    logits = np.array([[1e4, 0.0], [1e4, 0.0]])
    assert math.isfinite(fit_temperature(logits, np.array([[False, True], [True, False]])))


# Censored replies


def test_censored_rows_give_the_knots_of_the_uncensored() -> None:
    rng = np.random.default_rng(6)
    true, cuts = rng.beta(2, 1.5, 20_000), rng.random(20_000)
    seen, censored = np.minimum(true, cuts), cuts < true
    assert 0.4 < censored.mean() < 0.65
    nobody = np.zeros(20_000, dtype=bool)
    whole, known = conformal_knots(true, nobody), conformal_knots(seen, censored)
    upto = 86  # further up hardly anyone is left at risk
    assert np.max(np.abs(known - whole)[:upto]) < 0.025
    ignored, left_out = conformal_knots(seen, nobody), conformal_knots(true[~censored], nobody[~censored])
    for wrong in (ignored, left_out):
        assert np.max(np.abs(wrong - whole)[:upto]) > 0.1


def test_kaplan_meier_by_hand() -> None:
    """Deaths 1/4 at 0.2; at 0.6 one of the two left: 3/4 * 1/2 survive. The last is censored: nothing is known beyond,
    and levels rise evenly to 1."""
    pits, censored = np.array([0.2, 0.4, 0.6, 0.8]), np.array([False, True, False, True])
    knots = conformal_knots(pits, censored)
    shares = [0.25 * 4 / 5, 0.625 * 4 / 5]  # times n / (n + 1)
    unknown = 0.6 + 0.4 * (GRID - shares[1]) / (1 - shares[1])
    expected = np.select([shares[0] >= GRID - 1e-9, shares[1] >= GRID - 1e-9], [0.2, 0.6], unknown)
    expected[0] = 0.0
    np.testing.assert_allclose(knots, expected, atol=1e-8)


def test_a_row_cut_where_another_ended_was_still_at_risk_there() -> None:
    tied = conformal_knots(np.array([0.5, 0.5]), np.array([False, True]))
    assert tied[33] == pytest.approx(0.5)  # 1/2 * 2/3
    assert tied[34] == pytest.approx(0.5 + 0.5 * (0.34 - 1 / 3) / (1 - 1 / 3))


def test_where_nothing_was_cut_the_last_level_is_the_end() -> None:
    """Conformal: of two rows none is at level 0.9; with a cut row the model's own shape is kept there."""
    whole = conformal_knots(np.array([0.2, 0.5]), np.array([False, False]))
    assert whole[90] == pytest.approx(1.0)
    cut = conformal_knots(np.array([0.2, 0.5]), np.array([False, True]))
    assert 0.2 < cut[50] < cut[90] < 1.0
    everything_cut = conformal_knots(np.array([0.2, 0.5]), np.array([True, True]))
    np.testing.assert_allclose(everything_cut, GRID, atol=1e-6)


# The map


def test_identity_changes_nothing() -> None:
    shares = softmax(np.random.default_rng(7).normal(0, 3, (50, NUM_BUCKETS)))
    same = identity()
    assert same.temperature == 1.0
    np.testing.assert_allclose(same.apply(shares, np.arange(50) % same.num_groups), shares, atol=1e-12)


def test_calibrating_the_calibrated_changes_little() -> None:
    rng = np.random.default_rng(8)
    logits, lengths = draw(rng, 20_000)
    knots = conformal_knots(pit_values(EDGES, softmax(logits), lengths), np.zeros(20_000, dtype=bool))
    assert np.max(np.abs(knots - GRID)) < 0.02


def some_pits(kind: str) -> Array:
    rng = np.random.default_rng(9)
    return {
        "spread": rng.random(900),
        "at both ends": np.where(rng.random(900) < 0.5, 0.0, 1.0),  # a forecast that is sure and wrong
        "near zero": rng.random(900) * 1e-9,
        "a few values": rng.choice([0.1, 0.5, 0.5000001], 900),
    }[kind]


@pytest.mark.parametrize("kind", ["spread", "at both ends", "near zero", "a few values"])
def test_json_round_trip_calibrates_alike(kind: str) -> None:
    pits = some_pits(kind)
    groups = np.arange(900) % 4
    fitted = fit_recalibration(1.37, (64,), pits, np.zeros(900, dtype=bool), groups)
    again = Recalibration.from_json(json.loads(json.dumps(fitted.to_json())))
    assert again.temperature == fitted.temperature
    assert again.prompt_edges_tokens == (64,)
    shares = softmax(np.random.default_rng(10).normal(0, 3, (40, NUM_BUCKETS)))
    shares[0], shares[1] = np.eye(NUM_BUCKETS)[[0, -1]]
    some = np.arange(40) % 4
    np.testing.assert_allclose(again.apply(shares, some), fitted.apply(shares, some), atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [{"knots": [[0.0, 1.0]]}, {"knots": []}, {"prompt_edges_tokens": [1, 2]}, {"temperature": "hot"}, {"knots": None}],
)
def test_json_of_another_shape_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Recalibration.from_json({**identity().to_json(), **changes})


PITS = hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(0, 1))
WEIGHTS = hnp.arrays(np.float64, (3, 6), elements=st.floats(0, 1)).filter(lambda w: bool((w.sum(axis=1) > 1e-3).all()))


@given(pits=PITS, weights=WEIGHTS, seed=st.integers(0, 99))
def test_knots_rise_and_forecasts_stay_distributions_in_order(pits: Array, weights: Array, seed: int) -> None:
    censored = np.random.default_rng(seed).random(len(pits)) < 0.3
    knots = conformal_knots(pits, censored)
    assert (knots[0], knots[-1]) == (0.0, 1.0)
    assert np.all(np.diff(knots) > 0)
    fitted = Recalibration(1.0, (), (tuple(knots.tolist()),) * 2)
    shares = weights / weights.sum(axis=1, keepdims=True)
    found = fitted.apply(shares, np.array([0, 1, 1]))
    assert np.all(found >= 0)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, atol=1e-9)
    # of two forecasts the one that is shorter throughout stays so
    shorter = np.concatenate([shares[:, :1] + shares[:, 1:2], 0 * shares[:, :1], shares[:, 2:]], axis=1)
    both = fitted.apply(shorter, np.array([0, 1, 1])).cumsum(axis=1), found.cumsum(axis=1)
    assert np.all(both[0] >= both[1] - 1e-9)


@given(weights=WEIGHTS, lengths=hnp.arrays(np.int64, 3, elements=st.integers(0, 10_000)))
def test_pit_is_the_forecasts_own_distribution_function(weights: Array, lengths: Array) -> None:
    edges = tuple(range(0, 601, 100))
    shares = weights / weights.sum(axis=1, keepdims=True)
    for share, length, pit in zip(shares, lengths, pit_values(edges, shares, lengths), strict=True):
        assert pit == pytest.approx(1 - LengthForecast.from_weights(edges, share).probability_over(int(length)))


def test_pit_by_hand() -> None:
    shares = np.tile([0.4, 0.6], (7, 1))
    lengths = np.array([0, 49, 99, 100, 149, 199, 5000])
    expected = [0.004, 0.2, 0.4, 0.406, 0.7, 1.0, 1.0]
    np.testing.assert_allclose(pit_values((0, 100, 200), shares, lengths), expected, atol=1e-12)


# Groups


def test_groups_by_length_and_role() -> None:
    tokens, replies = np.array([0, 15, 16, 127, 128, 9999]), np.array([0, 1])
    found = group_of((16, 128), np.repeat(tokens, 2), np.tile(replies, 6)).reshape(6, 2)
    assert found.tolist() == [[0, 3], [0, 3], [1, 4], [1, 4], [2, 5], [2, 5]]
    assert num_groups((16, 128)) == 6
    assert group_of((), np.array([3, 3]), np.array([0, 7])).tolist() == [0, 1]


def test_a_small_group_borrows_everyones_knots() -> None:
    rng = np.random.default_rng(11)
    groups = np.repeat([0, 1, 2], [MIN_GROUP_ROWS - 1, MIN_GROUP_ROWS, 500])  # none in group 3
    pits = rng.random(len(groups)) ** (groups + 1)
    censored = rng.random(len(groups)) < 0.1
    fitted = fit_recalibration(1.0, (64,), pits, censored, groups)
    everyone = tuple(conformal_knots(pits, censored).tolist())
    assert fitted.knots[0] == fitted.knots[3] == everyone
    for group in (1, 2):
        own = groups == group
        assert fitted.knots[group] == tuple(conformal_knots(pits[own], censored[own]).tolist()) != everyone
