from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serving_plugin.core.forecast import LengthForecast, LengthRange, history_forecast, refresh_range

ONE_HOT = LengthForecast.one_hot(LengthRange(200, 400))
EVEN = LengthForecast((0, 200, 400, 600, 800), (0.25, 0.25, 0.25, 0.25))


@st.composite
def forecasts(draw):
    edges = sorted(draw(st.sets(st.integers(0, 300), min_size=2, max_size=6)))
    weights = draw(st.lists(st.integers(0, 5), min_size=len(edges) - 1, max_size=len(edges) - 1))
    assume(sum(weights))
    return LengthForecast.from_weights(edges, weights)


def masses(forecast):
    """P(length = x) for every x: the forecast read as slowly as it is defined."""
    out = {}
    for (low, high), p in zip(pairwise(forecast.edges_tokens), forecast.probabilities, strict=True):
        out.update(dict.fromkeys(range(low, high), p / (high - low)))
    return out


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (3, 3), (4, 3)])
def test_a_range_is_half_open_and_finite(low, high):
    with pytest.raises(ValueError, match="needs 0 <= low < high"):
        LengthRange(low, high)


@pytest.mark.parametrize(
    ("edges", "probabilities", "message"),
    [
        ((0, 1), (), "need"),
        ((0,), (), "need"),
        ((0, 1, 2), (1.0,), "need 2 edges"),
        ((0, 0), (1.0,), "must rise"),
        ((-1, 1), (1.0,), "must rise"),
        ((0, 1, 2), (0.5, 0.4), "sum to 1"),
        ((0, 1, 2), (1.5, -0.5), "lie in"),
        ((0, 1), (float("nan"),), "lie in"),
    ],
)
def test_what_is_no_distribution_is_refused(edges, probabilities, message):
    with pytest.raises(ValueError, match=message):
        LengthForecast(edges, probabilities)


def test_weights_without_mass_are_no_forecast():
    with pytest.raises(ValueError, match="zero"):
        LengthForecast.from_weights((0, 1, 2), (0, 0))


@pytest.mark.parametrize(("q", "expected"), [(0.0, 0), (0.25, 199), (0.2501, 200), (0.5, 399), (0.75, 599), (1.0, 799)])
def test_quantiles_of_an_even_forecast(q, expected):
    assert EVEN.quantile(q) == expected


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_a_quantile_outside_zero_to_one_is_a_mistake(q):
    with pytest.raises(ValueError, match="outside"):
        EVEN.quantile(q)


@given(forecasts(), st.integers(0, 100))
def test_a_quantile_is_the_smallest_length_that_reaches_it(forecast, percent):
    q, total = percent / 100, 0.0
    mass = masses(forecast)
    for length in sorted(length for length, p in mass.items() if p > 0):
        total += mass[length]
        if total >= q - 1e-9:
            break
    assert forecast.quantile(q) == length


def test_the_highest_quantile_stays_where_there_is_mass_when_probabilities_sum_to_nearly_one():
    assert LengthForecast((0, 10, 20), (0.9995, 0.0)).quantile(1.0) == 9


@given(forecasts(), st.floats(0.01, 1.0))
def test_a_range_covers_what_it_promises(forecast, coverage):
    interval = forecast.range(coverage)
    inside = sum(p for x, p in masses(forecast).items() if interval.low_tokens <= x < interval.high_tokens)
    assert inside >= coverage - 1e-6


def test_the_range_of_a_one_hot_forecast_is_its_bucket():
    assert ONE_HOT.range(0.5) == ONE_HOT.range(1.0) == LengthRange(200, 400)
    assert LengthForecast((0, 200, 400), (0.0, 1.0)).range(0.5) == LengthRange(200, 400)


@pytest.mark.parametrize("coverage", [0.0, -1.0, 1.01])
def test_an_impossible_coverage_is_a_mistake(coverage):
    with pytest.raises(ValueError, match="coverage"):
        EVEN.range(coverage)


@given(forecasts(), st.integers(0, 320))
def test_probability_over_is_the_mass_above(forecast, tokens):
    above = sum(p for x, p in masses(forecast).items() if x > tokens)
    assert forecast.probability_over(tokens) == pytest.approx(above, abs=1e-9)


def test_mean_and_argmax():
    assert EVEN.mean_tokens() == pytest.approx(399.5)
    assert EVEN.argmax_bucket() == LengthRange(0, 200)  # the shorter of equals
    assert LengthForecast((0, 200, 400), (0.4, 0.6)).argmax_bucket() == LengthRange(200, 400)


@pytest.mark.parametrize(
    ("forecast", "over", "heavy"),
    [
        (LengthForecast.one_hot(LengthRange(0, 200)), 128, False),
        (ONE_HOT, 128, True),
        (LengthForecast.one_hot(LengthRange(100, 156)), 128, False),  # midpoint 128 is not over
        (LengthForecast.one_hot(LengthRange(100, 158)), 128, True),
        (ONE_HOT, 300, False),
        (LengthForecast((0, 129, 1000), (0.5, 0.5)), 128, True),
        (LengthForecast((0, 129, 1000), (0.51, 0.49)), 128, False),
    ],
)
def test_heavy_decode(forecast, over, heavy):
    assert forecast.is_heavy(over) is heavy


@pytest.mark.parametrize(
    ("forecast", "max_tokens", "edges", "probabilities"),
    [
        (EVEN, 800, EVEN.edges_tokens, EVEN.probabilities),
        (EVEN, 799, EVEN.edges_tokens, EVEN.probabilities),
        (EVEN, 400, (0, 200, 400, 401), (0.25, 0.25, 0.5)),
        (EVEN, 300, (0, 200, 300, 301), (0.25, 0.125, 0.625)),
        (EVEN, 1, (0, 1, 2), (0.00125, 0.99875)),
        (ONE_HOT, 300, (200, 301), (1.0,)),
        (ONE_HOT, 200, (200, 201), (1.0,)),
        (ONE_HOT, 50, (50, 51), (1.0,)),
        (LengthForecast((0, 200, 400), (0.0, 1.0)), 50, (50, 51), (1.0,)),
    ],
)
def test_clipping(forecast, max_tokens, edges, probabilities):
    clipped = forecast.clipped(max_tokens)
    assert clipped.edges_tokens == edges
    assert clipped.probabilities == pytest.approx(probabilities)


@given(forecasts(), st.integers(1, 320))
def test_clipping_moves_the_mass_beyond_onto_the_limit(forecast, max_tokens):
    clipped = forecast.clipped(max_tokens)
    assert clipped.is_one_hot or not forecast.is_one_hot
    assert clipped.edges_tokens[-1] <= max(max_tokens + 1, forecast.edges_tokens[0] + 1)
    if forecast.is_one_hot:
        return
    expected = {}
    for x, p in masses(forecast).items():
        expected[min(x, max_tokens)] = expected.get(min(x, max_tokens), 0.0) + p
    got = masses(clipped)
    for x in range(max_tokens + 1):
        assert got.get(x, 0.0) == pytest.approx(expected.get(x, 0.0), abs=1e-9)


def test_a_limit_below_one_is_a_mistake():
    with pytest.raises(ValueError, match="max_tokens 0"):
        EVEN.clipped(0)


@given(forecasts(), st.integers(0, 400))
def test_conditioning_on_more_than_is_what_it_says(forecast, out):
    given_more = forecast.given_more_than(out)
    assert sum(given_more.probabilities) == pytest.approx(1.0)
    above = {x: p for x, p in masses(forecast).items() if x > out}
    got = {x: p for x, p in masses(given_more).items() if p > 0}
    assert max(got) > out
    if out + 1 < forecast.edges_tokens[-1]:
        assert min(got) > out
    if sum(above.values()) > 0:
        for x, p in above.items():
            assert got.get(x, 0.0) == pytest.approx(p / sum(above.values()), abs=1e-9)


def test_beyond_all_that_is_known_the_last_width_goes_on():
    assert EVEN.given_more_than(799) == LengthForecast.one_hot(LengthRange(800, 1000))
    assert EVEN.given_more_than(1234) == LengthForecast.one_hot(LengthRange(1200, 1400))


@given(forecasts(), st.integers(1, 100))
def test_regrouping_keeps_mass_in_its_place(forecast, granularity):
    regrouped = forecast.regrouped(granularity)
    assert regrouped.edges_tokens[:2] == (0, granularity)
    mass = masses(forecast)
    for (low, high), p in zip(pairwise(regrouped.edges_tokens), regrouped.probabilities, strict=True):
        assert high - low == granularity
        assert p == pytest.approx(sum(q for x, q in mass.items() if low <= x < high), abs=1e-9)


def test_history_is_the_empirical_distribution_in_buckets():
    assert history_forecast([10, 20, 250, 999], 1000) == LengthForecast(
        (0, 200, 400, 600, 800, 1000), (0.5, 0.25, 0.0, 0.0, 0.25)
    )
    assert history_forecast(iter([200]), 1000, 200) == LengthForecast((0, 200, 400), (0.0, 1.0))
    assert history_forecast([], 1000) == LengthForecast((0, 1000), (1.0,))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_history_never_excludes_what_was_seen(lengths):
    interval = history_forecast(lengths, 1000).range(1.0)
    assert interval.low_tokens <= min(lengths)
    assert max(lengths) < interval.high_tokens


@pytest.mark.parametrize(
    ("out", "expected"),
    [(0, (200, 400)), (399, (200, 400)), (400, (400, 600)), (599, (400, 600)), (1000, (1000, 1200))],
)
def test_an_outgrown_bucket_is_followed_by_its_successor(out, expected):
    assert refresh_range(ONE_HOT, LengthRange(200, 400), out, 0.9) == LengthRange(*expected)


def test_an_outgrown_interval_is_conditioned_on_what_is_out():
    current = EVEN.range(0.5)
    assert current == LengthRange(199, 600)
    assert refresh_range(EVEN, current, 599, 0.5) == current
    assert refresh_range(EVEN, current, 600, 0.5) == EVEN.given_more_than(600).range(0.5)


def test_the_next_range_ends_where_the_reply_must():
    assert refresh_range(ONE_HOT, LengthRange(200, 400), 400, 0.9, max_tokens=450) == LengthRange(400, 451)
    assert refresh_range(ONE_HOT, LengthRange(200, 400), 400, 0.9, max_tokens=600) == LengthRange(400, 600)
    assert refresh_range(ONE_HOT, LengthRange(200, 400), 400, 0.9, max_tokens=400) == LengthRange(400, 401)


@given(forecasts(), st.integers(0, 600), st.floats(0.05, 1.0), st.none() | st.integers(1, 700))
def test_the_range_in_force_always_lies_ahead(forecast, out, coverage, max_tokens):
    current = forecast.range(coverage)
    following = refresh_range(forecast, current, out, coverage, max_tokens)
    assert following.high_tokens > out
    if out >= current.high_tokens and max_tokens is not None and max_tokens > out:
        assert following.high_tokens <= max_tokens + 1
