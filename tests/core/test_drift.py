"""Drift watch: summaries, the transition rule, fallback and return, what is left out and what is forgotten."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.core.drift import (
    DEFAULT_WINDOW,
    RETURN_SHARE,
    DriftSettings,
    DriftWatch,
    DriftWatches,
    ForecastSummary,
    Transition,
    kendall_tau,
    next_trust,
    summarise,
)
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast, LengthRange

FORECAST = LengthForecast((0, 100, 200, 300, 400), (0.1, 0.4, 0.4, 0.1))
SUMMARY = summarise(FORECAST, "p v1", 0.9, 1000)
SHORT, LONG = 150, 350  # within SUMMARY's upper bound of 299, and beyond it
SETTINGS = DriftSettings(window=20, min_samples=10, band=0.15, return_band=0.10)


# Summaries


def test_a_summary_of_a_distribution() -> None:
    assert ForecastSummary("p v1", False, 0.9, pytest.approx(199.5), 199, 49, 350, 299, False) == SUMMARY


@pytest.mark.parametrize(
    ("max_tokens", "median", "low", "high", "upper", "is_limited"),
    [(300, 199, 49, 301, 299, False), (299, 199, 49, 300, 299, True), (40, 40, 40, 41, 40, True)],
)
def test_a_summary_ends_at_the_limit(
    max_tokens: int, median: int, low: int, high: int, upper: int, is_limited: bool
) -> None:
    summary = summarise(FORECAST, "p", 0.9, max_tokens)
    assert (summary.median_tokens, summary.low_tokens, summary.high_tokens) == (median, low, high)
    assert (summary.upper_tokens, summary.is_limited) == (upper, is_limited)
    assert summary.mean_tokens <= max_tokens


def test_mass_of_a_one_hot_bucket_beyond_the_limit_lies_on_it() -> None:
    summary = summarise(LengthForecast.one_hot(LengthRange(200, 400)), "p", 0.9, 256)
    assert (summary.median_tokens, summary.upper_tokens, summary.is_limited) == (256, 256, True)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.data(),
    st.floats(0.05, 0.99),
    st.integers(1, 2000),
    st.booleans(),
)
def test_any_summary_survives_the_wire(
    widths: list[int], data: st.DataObject, coverage: float, max_tokens: int, is_shadow: bool
) -> None:
    edges = [sum(widths[:i]) for i in range(len(widths) + 1)]
    weights = data.draw(st.lists(st.floats(0.001, 1), min_size=len(widths), max_size=len(widths)))
    forecast = LengthForecast.from_weights(edges, weights)
    summary = summarise(forecast, "p v1", coverage, max_tokens, is_shadow)
    assert ForecastSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary
    assert summary.upper_tokens <= max_tokens and summary.high_tokens <= max_tokens + 1


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {},
        SUMMARY.to_dict() | {"colour": 1},
        {key: value for key, value in SUMMARY.to_dict().items() if key != "model"},
        SUMMARY.to_dict() | {"model": ""},
        SUMMARY.to_dict() | {"model": "a\nb"},
        SUMMARY.to_dict() | {"model": "x" * 300},
        SUMMARY.to_dict() | {"is_shadow": 0},
        SUMMARY.to_dict() | {"coverage": float("nan")},
        SUMMARY.to_dict() | {"coverage": 1.0},
        SUMMARY.to_dict() | {"mean_tokens": float("inf")},
        SUMMARY.to_dict() | {"mean_tokens": 10**400},
        SUMMARY.to_dict() | {"upper_tokens": -1},
        SUMMARY.to_dict() | {"upper_tokens": 3.5},
        SUMMARY.to_dict() | {"low_tokens": 300},
        SUMMARY.to_dict() | {"high_tokens": 10**400},
    ],
)
def test_what_is_no_summary_is_refused_in_one_line(raw: object) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*forecast summary[^\n]*$"):
        ForecastSummary.from_dict(raw)


# The rule


@pytest.mark.parametrize(
    ("is_trusted", "coverage", "num_samples", "expected"),
    [
        (True, 0.0, 9, True),  # too few to tell
        (True, 0.52, 10, False),
        (True, 0.53, 10, True),  # the band ends at 0.75, chance explains 0.225 more
        (True, 0.72, 1000, False),
        (True, 0.73, 1000, True),  # 0.023 more
        (True, 1.0, 10, True),
        (False, 0.9, 9, False),
        (False, 0.79, 10, False),  # inside the band, not yet inside the return band
        (False, 0.80, 10, True),
        (False, 1.0, 10, True),
        (True, None, 0, True),
        (False, None, 0, False),
    ],
)
def test_transition_rule(is_trusted: bool, coverage: float | None, num_samples: int, expected: bool) -> None:
    assert next_trust(is_trusted, coverage, 0.9, num_samples, SETTINGS) is expected


@pytest.mark.parametrize(
    ("is_trusted", "coverage", "nominal", "expected"),
    [
        (True, 0.99, 0.8, False),
        (True, 0.95, 0.8, True),
        (False, 0.95, 0.8, False),
        (False, 0.90, 0.8, True),
        (False, 1.0, 0.85, True),  # the band reaches to 1: a cautious model would stay, so it may come back
        (False, 1.0, 0.84, False),
    ],
)
def test_over_coverage_is_drift_where_the_band_leaves_room(
    is_trusted: bool, coverage: float, nominal: float, expected: bool
) -> None:
    assert next_trust(is_trusted, coverage, nominal, 100, SETTINGS) is expected


def test_a_watch_that_is_off_trusts() -> None:
    assert next_trust(True, 0.0, 0.9, 100, replace(SETTINGS, enabled=False))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 0}, "drift_window=0: must be 1 to 10000"),
        ({"window": 10_001}, "drift_window=10001"),
        ({"min_samples": 21}, "drift_min_samples=21: must be 1 to the window of 20"),
        ({"band": 0.0}, "drift_band=0.0: must be between 0 and 1"),
        ({"band": float("nan")}, "drift_band=nan"),
        ({"return_band": 0.2}, "drift_return_band=0.2: must be over 0, up to 0.15"),
    ],
)
def test_settings_are_bounded(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^[^\n]*$") as caught:
        replace(SETTINGS, **changes)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_settings_from_band_and_window() -> None:
    assert DriftSettings.of(0.1, 200) == DriftSettings()
    assert DriftSettings.of(0.2, 30) == DriftSettings(30, 30, 0.2, 0.2 * RETURN_SHARE)
    assert not DriftSettings.of(0, 200).enabled
    with pytest.raises(ConfigurationError, match=r"drift_band=-0\.1"):
        DriftSettings.of(-0.1, 200)


# A watch


def feed(watch: DriftWatch, *actual_tokens: int) -> list[Transition | None]:
    return [watch.observe(SUMMARY, actual) for actual in actual_tokens]


def test_drift_falls_back_and_returns_by_itself() -> None:
    watch = DriftWatch("p v1", False, SETTINGS)
    assert feed(watch, *[SHORT] * 20) == [None] * 20
    turns = feed(watch, *[LONG] * 10)
    (first,) = [turn for turn in turns if turn]
    assert turns.index(first) == 8  # 9 of the 20 newest are long: 0.55 covered, and 0.60 could be chance
    assert first == Transition(False, pytest.approx(0.55), pytest.approx(0.9), 20)
    assert not watch.is_trusted

    # What came before the fallback neither holds nor releases: 4 long ones came since.
    feed(watch, *[LONG] * 3)
    assert watch.figures().num_samples == 4
    turns = feed(watch, *[SHORT] * 30)
    (back,) = [turn for turn in turns if turn]
    assert back.is_trusted and back.coverage == pytest.approx(0.8) and back.num_samples == 20
    assert watch.is_trusted and watch.figures().num_samples == 30 - 1 - turns.index(back)


def test_after_a_return_old_requests_do_not_make_it_fall_again() -> None:
    watch = DriftWatch("p v1", False, SETTINGS)
    feed(watch, *[LONG] * 10)
    assert not watch.is_trusted
    feed(watch, *[SHORT] * 10)
    assert watch.is_trusted
    assert feed(watch, *[LONG] * 9) == [None] * 9
    assert feed(watch, LONG) != [None]


def first_fallback(watch: DriftWatch, nominal: float, true_coverage: float, num_requests: int, seed: int) -> int | None:
    """After how many requests trust was lost."""
    rng = random.Random(seed)
    summary = replace(SUMMARY, coverage=nominal)
    for number in range(1, num_requests + 1):
        if watch.observe(summary, SHORT if rng.random() < true_coverage else LONG) is not None:
            return number
    return None


@pytest.mark.parametrize("nominal", [0.9, 0.8])
def test_a_calibrated_model_stays_trusted(nominal: float) -> None:
    # False alarms come early, in small windows: 0.1 in 100 seeds, and 3 and 14 if chance were not allowed for.
    watches = [DriftWatch("p", False, DriftSettings()) for _ in range(100)]
    falls = [first_fallback(watch, nominal, nominal, 400, seed) for seed, watch in enumerate(watches)]
    assert sum(number is not None for number in falls) <= 1


@pytest.mark.parametrize("num_good", [0, 1000])
def test_drift_is_caught_within_the_window(num_good: int) -> None:
    for seed in range(20):
        watch = DriftWatch("p", False, DriftSettings())
        assert first_fallback(watch, 0.9, 0.9, num_good, seed) is None
        assert first_fallback(watch, 0.9, 0.6, DEFAULT_WINDOW, seed + 1000) is not None


def test_requests_that_end_at_their_limit_at_the_latest_tell_nothing_of_coverage() -> None:
    watch = DriftWatch("p v1", False, SETTINGS)
    limited = summarise(FORECAST, "p v1", 0.9, 100)
    for _ in range(50):
        watch.observe(limited, 100)
    figures = watch.figures()
    assert (figures.num_observed, figures.num_samples, figures.coverage) == (50, 0, None)
    assert figures.mae_tokens == 0


def test_a_shadow_is_measured_and_never_decides() -> None:
    watches = DriftWatches(SETTINGS)
    shadow = summarise(FORECAST, "p v2", 0.9, 1000, is_shadow=True)
    for _ in range(30):
        assert watches.observe([replace(SUMMARY, upper_tokens=400), shadow], LONG) == []
    champion, challenger = watches.figures()
    assert (champion.model, champion.is_shadow, champion.coverage) == ("p v1", False, 1.0)
    assert (challenger.model, challenger.is_shadow, challenger.coverage) == ("p v2", True, 0.0)
    assert (challenger.num_observed, challenger.mae_tokens, challenger.interval_tokens) == (30, 151, 301)
    assert watches.is_trusted and challenger.is_trusted


def test_one_drifted_model_of_two_is_enough_until_it_is_served_no_more() -> None:
    watches = DriftWatches(SETTINGS)
    other = replace(SUMMARY, model="p v2")
    for _ in range(9):
        assert watches.observe([SUMMARY], LONG) == [] and watches.observe([other], SHORT) == []
    ((model, transition),) = watches.observe([SUMMARY], LONG)
    assert (model, transition.is_trusted, watches.is_trusted) == ("p v1", False, False)
    for _ in range(9):
        watches.observe([other], SHORT)
    assert not watches.is_trusted
    watches.observe([other], SHORT)
    assert watches.is_trusted and [figures.model for figures in watches.figures()] == ["p v2"]


def test_requests_without_a_forecast_change_nothing() -> None:
    watches = DriftWatches(SETTINGS)
    watches.observe([SUMMARY], SHORT)
    for _ in range(50):
        assert watches.observe([], LONG) == []
    assert watches.figures()[0].num_observed == 1


# Rank error


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([], None),
        ([(1, 1)], None),
        ([(1, 5), (1, 6)], None),  # one side does not vary
        ([(1, 5), (2, 6), (3, 9)], 1.0),
        ([(1, 9), (2, 6), (3, 5)], -1.0),
        ([(1, 1), (2, 3), (3, 2), (4, 4)], 2 / 3),
    ],
)
def test_kendall_tau(pairs: list[tuple[float, float]], tau: float | None) -> None:
    assert kendall_tau(pairs) == (tau if tau is None else pytest.approx(tau))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_kendall_tau_is_scipys_tau_b(pairs: list[tuple[float, float]]) -> None:
    from scipy.stats import kendalltau

    ours = kendall_tau(pairs)
    if ours is not None:
        assert ours == pytest.approx(kendalltau(*zip(*pairs, strict=True)).statistic)


def test_figures_rank_the_window() -> None:
    watch = DriftWatch("p v1", False, SETTINGS)
    for i in range(40):
        watch.observe(replace(SUMMARY, mean_tokens=float(i)), 100 + i)
    assert watch.figures().tau == pytest.approx(1.0)
