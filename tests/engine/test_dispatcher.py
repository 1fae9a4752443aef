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


def make(policy: str = "least_load", range: str = "argmax", **forecast: object) -> Dispatcher:
    return Dispatcher(DispatchSettings(policy), ForecastSettings(range, **forecast))  # type: ignore[arg-type]


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


def test_quantile_keeps_the_distribution_of_history_too() -> None:
    dispatcher = make(range="quantile")
    dispatcher.update_history([450, 460, 10])
    forecast, source, length_range, is_heavy = dispatcher.classify(None, 1000)
    assert (source, is_heavy, forecast.is_one_hot) == ("history", True, False)
    assert length_range.low_tokens < 200 and length_range.high_tokens > 460


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


URLS = {"d0": "http://d0", "d1": "http://d1", "p0": "http://p0"}


@pytest.mark.parametrize(
    ("exclude", "chosen"),
    [((), "d0"), (("d0",), "d1"), (("d1",), "d0"), (("d0", "d1"), None), (("nobody",), "d0")],
)
def test_excluded_instances_are_not_chosen(exclude: tuple[str, ...], chosen: str | None) -> None:
    dispatcher = make()
    dispatcher.update([LOAD, replace(LOAD, id="d1", num_free_blocks=99)], URLS)
    found = dispatcher.choose(request(), exclude=frozenset(exclude))
    assert found == (None if chosen is None else (chosen, URLS[chosen]))


@pytest.mark.parametrize(
    ("other", "exclude"),
    [(request(1), ("d0",)), (replace(request(1), num_prompt_tokens=1000), ())],  # excluded; too large for d0's pool
)
def test_a_promise_outlives_a_request_that_cannot_go_there(other: RequestInfo, exclude: tuple[str, ...]) -> None:
    dispatcher = make()
    dispatcher.update([LOAD, replace(LOAD, id="d1", num_total_blocks=200, num_free_blocks=99)], URLS)
    assert dispatcher.choose(request(0)) == ("d0", "http://d0")  # 35 blocks of its 100 are promised
    assert dispatcher.choose(other, frozenset(exclude)) == ("d1", "http://d1")
    assert dispatcher._promised["d0"].promise.num_blocks == 35


def test_what_is_not_a_decode_instance_is_not_judged() -> None:
    """A prefill instance's pool may be of any size, or unknown."""
    dispatcher = make()
    dispatcher.update([replace(LOAD, id="p0", role=Role.PREFILL, block_size_tokens=0, num_total_blocks=0), LOAD], URLS)
    assert dispatcher.choose(request()) == ("d0", "http://d0")
    assert dispatcher.can_ever_fit(request())


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "random", "imbalance"])
def test_a_pool_that_could_never_hold_the_request_is_left_out(policy: str) -> None:
    """160 + 1000 tokens are 73 blocks of 16."""
    dispatcher = make(policy)
    small, large = replace(LOAD, num_total_blocks=72), replace(LOAD, id="d1", num_total_blocks=73, num_free_blocks=0)
    dispatcher.update([small, large], URLS)
    assert [dispatcher.choose(request(i)) for i in range(9)] == [("d1", "http://d1")] * 9
    assert dispatcher.choose(request(), exclude=frozenset(["d1"])) is None


@pytest.mark.parametrize(
    ("loads", "can_ever_fit"),
    [
        ([], True),  # nobody is known: nobody can say
        ([replace(LOAD, id="p0", role=Role.PREFILL, num_total_blocks=5)], True),
        ([replace(LOAD, num_total_blocks=73)], True),
        ([replace(LOAD, num_total_blocks=72)], False),
        ([replace(LOAD, num_total_blocks=72), replace(LOAD, id="p0", role=Role.PREFILL)], False),
        ([replace(LOAD, num_total_blocks=72), replace(LOAD, id="d1")], True),
        ([replace(LOAD, num_total_blocks=72), replace(LOAD, id="d1", state=InstanceState.DRAINING)], True),
        ([replace(LOAD, num_free_blocks=0)], True),  # full now, not for ever
    ],
)
def test_a_request_can_never_fit_only_if_every_known_decode_instance_is_too_small(
    loads: list[InstanceLoad], can_ever_fit: bool
) -> None:
    dispatcher = make()
    dispatcher.update(loads, URLS)
    assert dispatcher.can_ever_fit(request()) is can_ever_fit


@pytest.mark.parametrize(
    ("loads", "room_tokens"),
    [
        ([], None),
        ([LOAD], None),  # its own
        ([LOAD, replace(LOAD, id="d1", num_free_blocks=7)], 7 * 16),
        ([LOAD, replace(LOAD, id="d1", num_free_blocks=7), replace(LOAD, id="d2", num_free_blocks=8)], 8 * 16),
        ([replace(LOAD, id="d1", num_free_blocks=7, block_size_tokens=32)], 7 * 32),
        ([replace(LOAD, id="d1", num_free_blocks=7, num_vetoed_tokens=33)], 4 * 16),  # spoken for by its own queue
        ([replace(LOAD, id="d1", num_free_blocks=7, num_vetoed_tokens=7 * 16)], None),
        ([replace(LOAD, id="d1", num_free_blocks=7, num_vetoed_tokens=900)], None),
        ([replace(LOAD, id="d1", num_free_blocks=0)], None),
        ([replace(LOAD, id="p0", role=Role.PREFILL)], None),
        ([replace(LOAD, id="d1", state=InstanceState.DRAINING)], None),
        ([replace(LOAD, id="d1", state=InstanceState.STARTING)], None),
    ],
)
def test_room_elsewhere_is_that_of_the_roomiest_other_ready_decode_instance(
    loads: list[InstanceLoad], room_tokens: int | None
) -> None:
    dispatcher = make()
    dispatcher.update(loads, URLS)
    assert dispatcher.room_elsewhere_tokens("d0") == room_tokens
