"""Dispatch on a prefill instance: ranges from forecasts, promises between reports."""

from dataclasses import replace

import pytest

from serving_plugin.core.config import DispatchSettings, ForecastSettings
from serving_plugin.core.forecast import LengthForecast, LengthRange
from serving_plugin.core.types import InstanceLoad, InstanceState, RequestInfo, Role
from serving_plugin.engine.dispatcher import Dispatcher

LOAD = InstanceLoad(
    id="d0", incarnation="x", role=Role.DECODE, role_epoch=0, state=InstanceState.READY, sequence=1, num_waiting=0,
    num_loading=0, num_running=0, num_waiting_prompt_tokens=0, num_vetoed_tokens=0, num_total_blocks=100,
    num_free_blocks=100, num_pinned_blocks=0, block_size_tokens=16, num_heavy_decodes=0, num_light_decodes=0,
    busy_fraction=0.0,
)  # fmt: skip
FORECAST = LengthForecast((0, 100, 200, 300, 400), (0.1, 0.1, 0.5, 0.3))


def make(policy: str = "least_load", **forecast: object) -> Dispatcher:
    return Dispatcher(DispatchSettings(policy), ForecastSettings(**forecast))  # type: ignore[arg-type]


def request(number: int = 0) -> RequestInfo:
    return RequestInfo(f"r{number}", 0.0, 160, 1000, length_range=LengthRange(200, 400), is_heavy_decode=True)


def test_argmax_is_one_bucket_of_the_granularity() -> None:
    forecast, source, length_range, is_heavy = make().classify(FORECAST, 1000)
    assert (source, length_range, is_heavy) == ("model", LengthRange(200, 400), True)
    assert forecast.is_one_hot


def test_quantile_keeps_the_distribution() -> None:
    forecast, source, length_range, is_heavy = make(range="quantile", coverage=0.8).classify(FORECAST, 1000)
    assert (source, forecast, is_heavy) == ("model", FORECAST, True)
    assert length_range.low_tokens >= 99 and length_range.high_tokens <= 400


def test_max_tokens_bounds_the_range() -> None:
    _, _, length_range, _ = make().classify(FORECAST, 250)
    assert length_range == LengthRange(200, 251)


def test_without_forecast_history_answers() -> None:
    dispatcher = make()
    assert dispatcher.classify(None, 50)[1:3] == ("history", LengthRange(0, 51))
    dispatcher.update_history([450, 460, 10])
    assert dispatcher.classify(None, 1000)[1:3] == ("history", LengthRange(400, 600))


def test_history_answers_while_any_gateway_distrusts_forecasts() -> None:
    dispatcher = make()
    dispatcher.update_history([450, 460, 10])
    trusted = dispatcher.classify(FORECAST, 1000)
    dispatcher.update_trust("http://g0", True)
    dispatcher.update_trust("http://g1", False)
    forecast, source, length_range, is_heavy = dispatcher.classify(FORECAST, 1000)
    assert (source, length_range, is_heavy) == ("history:drift", LengthRange(400, 600), True)
    assert forecast == dispatcher.classify(None, 1000)[0]
    assert dispatcher.classify(None, 1000)[1] == "history"
    dispatcher.update_trust("http://g0", False)
    dispatcher.update_trust("http://g1", True)
    assert dispatcher.distrusting_gateways == ("http://g0",)
    assert dispatcher.classify(FORECAST, 1000)[1] == "history:drift"
    dispatcher.update_trust("http://g0", True)
    assert dispatcher.classify(FORECAST, 1000) == trusted


def test_promises_spread_between_reports_and_end_with_the_next_one() -> None:
    dispatcher = make()
    loads = [LOAD, replace(LOAD, id="d1", num_free_blocks=99)]
    urls = {"d0": "http://d0", "d1": "http://d1"}
    dispatcher.update(loads, urls)
    assert [dispatcher.choose(request(i)) for i in range(3)] == [
        ("d0", "http://d0"),
        ("d1", "http://d1"),
        ("d0", "http://d0"),
    ]
    dispatcher.update([replace(load, sequence=2) for load in loads], urls)
    assert dispatcher.choose(request(9)) == ("d0", "http://d0")


@pytest.mark.parametrize("state", [InstanceState.STARTING, InstanceState.DRAINING, InstanceState.LOST])
def test_no_ready_instance(state: InstanceState) -> None:
    dispatcher = make()
    dispatcher.update([replace(LOAD, state=state)], {"d0": "http://d0"})
    assert dispatcher.choose(request()) is None
