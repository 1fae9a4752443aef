"""How long requests wait for forecasts that keep coming late."""

import logging

import pytest

from serving_plugin.engine.breaker import MAX_LATE_IN_A_ROW, ForecastBreaker


def observed(*in_time: bool) -> ForecastBreaker:
    breaker = ForecastBreaker(2.0)
    for is_in_time in in_time:
        breaker.observe(is_in_time)
    return breaker


def test_requests_wait_the_whole_timeout_until_three_forecasts_in_a_row_are_late() -> None:
    assert MAX_LATE_IN_A_ROW == 3
    assert [observed(*[False] * n).patience_s for n in range(5)] == [2.0, 2.0, 2.0, 0.0, 0.0]
    assert [observed(*[False] * n).is_open for n in range(5)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("in_time", "patience_s"),
    [
        ([True] * 9, 2.0),
        ([False, False, True, False, False], 2.0),  # not in a row
        ([False, False, True, False, False, False], 0.0),
        ([False] * 9 + [True], 2.0),  # one in time is enough
        ([False] * 9 + [True, False, False], 2.0),  # and the count begins anew
        ([False] * 9 + [True, False, False, False], 0.0),
    ],
)
def test_only_late_ones_in_a_row_count_and_one_in_time_ends_it(in_time: list[bool], patience_s: float) -> None:
    assert observed(*in_time).patience_s == patience_s


def test_each_change_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    observed(True, *[False] * 9, True, True)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "3 length forecasts in a row took over 2 s: history is used, nobody waits until one is in time",
        ),
        ("WARNING", "length forecasts come in time again"),
    ]
