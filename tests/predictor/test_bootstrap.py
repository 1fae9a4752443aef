"""Intervals by conversation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serving_plugin.predictor.evaluation.bootstrap import Interval, bootstrap, paired_gain


def test_interval_of_a_known_difference_covers_it() -> None:
    rng = np.random.default_rng(1)
    roots = np.repeat([f"c{i}" for i in range(300)], 2)
    shared = rng.normal(0, 5, 600)  # noise of the rows, which pairing takes out
    a, b = shared + rng.normal(0.3, 0.5, 600), shared + rng.normal(0, 0.5, 600)
    gain = paired_gain(a, b, roots, 500, seed=0)
    assert gain.value == pytest.approx(a.mean() - b.mean())
    assert gain.low < 0.3 < gain.high
    assert gain.low > 0
    assert gain.high - gain.low < 0.2  # unpaired: about 1.1


def test_coverage_is_near_95_percent() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for trial in range(100):
        roots = np.repeat(np.arange(80).astype(str), 3)
        a = np.repeat(rng.normal(0, 1, 80), 3) + rng.normal(0.5, 1, 240)
        gain = paired_gain(a, np.zeros(240), roots, 200, seed=trial)
        covered += gain.low <= 0.5 <= gain.high
    assert covered >= 88


def test_by_conversation_is_wider_than_by_row_on_rows_that_are_alike() -> None:
    rng = np.random.default_rng(3)
    a = np.repeat(rng.normal(0, 1, 60), 8)  # eight turns say the same
    zeros = np.zeros(len(a))
    by_root = paired_gain(a, zeros, np.repeat(np.arange(60).astype(str), 8), 500, seed=0)
    by_row = paired_gain(a, zeros, np.arange(len(a)).astype(str), 500, seed=0)
    assert by_root.high - by_root.low > 2 * (by_row.high - by_row.low)


def test_whole_conversations_are_drawn() -> None:
    roots = ["b", "a", "b", "c", "b"]  # not sorted, of unequal size
    members = {"a": [1], "b": [0, 2, 4], "c": [3]}
    seen = []

    def statistic(chosen: np.ndarray) -> float:
        counts = np.bincount(chosen, minlength=5)
        for rows in members.values():
            assert len({int(counts[row]) for row in rows}) == 1
        seen.append(sum(int(counts[rows[0]]) for rows in members.values()))
        return float(len(chosen))

    bootstrap(statistic, roots, 50, seed=0)
    assert set(seen) == {3}  # as many conversations as there are


def test_undefined_draws_are_left_out_and_none_gives_nan() -> None:
    roots = ["a", "b", "c"]
    values = np.asarray([1.0, math.nan, 3.0])
    some = bootstrap(lambda chosen: float(values[chosen].mean()), roots, 200, seed=0)
    assert math.isnan(some.value)
    assert 1.0 <= some.low <= some.high <= 3.0
    for interval in (bootstrap(lambda _: math.nan, roots, 20, 0), bootstrap(lambda _: 1.0, roots, 0, 0)):
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)


def test_same_seed_same_interval() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.random(50), rng.random(50)
    roots = np.repeat(np.arange(25).astype(str), 2)
    assert paired_gain(a, b, roots, 100, 7) == paired_gain(a, b, roots, 100, 7)
    assert paired_gain(a, b, roots, 100, 7) != paired_gain(a, b, roots, 100, 8)


def test_plain_form_is_json() -> None:
    assert Interval(0.123456, math.nan, 1.0).to_plain() == {"value": 0.1235, "low": None, "high": 1.0}


def test_rows_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        paired_gain(np.zeros(3), np.zeros(4), ["a"] * 3, 10, 0)
    with pytest.raises(ValueError, match="one shape"):
        paired_gain(np.zeros(3), np.zeros(3), ["a"] * 2, 10, 0)
    with pytest.raises(ValueError, match="at least one row"):
        paired_gain(np.zeros(0), np.zeros(0), [], 10, 0)
