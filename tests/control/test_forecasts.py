"""Drift watch and shadow through a gateway with stub instances: what broadcasts, metrics, status and log say."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from aiohttp import web

from serving_plugin.control.forecasts import MAX_SUMMARIES, ForecastMonitor
from serving_plugin.control.settings import GatewaySettings
from serving_plugin.core.drift import DriftSettings, summarise
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.core.types import Role

pytestmark = pytest.mark.timeout(60)

GOOD = summarise(LengthForecast((0, 10), (1.0,)), "length-predictor v3", 0.9, 100).to_dict()  # up to 8 tokens
BAD = GOOD | {"upper_tokens": 2}  # the stub answers with three


@pytest.fixture
async def cluster(bare):
    """1P + 1D behind a gateway that decides over 10 requests; coverage 1.0 is inside the return band."""
    await bare.stop()
    await bare.start(drift_window=10, drift_band=0.2)
    bare.instances.clear()
    await bare.add("p0", Role.PREFILL)
    await bare.add("d0", Role.DECODE)
    return bare


async def feed(cluster, number: int, *summaries, stream: bool = False) -> None:
    cluster.instances["p0"].summaries = list(summaries)
    for _ in range(number):
        if stream:
            async with cluster.http.post("/v1/completions", json={"prompt": "hi", "stream": True}) as response:
                await response.read()
        else:
            assert (await cluster.complete())[0] == 200


def is_trusted_by_broadcast(cluster) -> bool:
    """What an agent hears from now on."""
    return cluster.instances["p0"].broadcasts[-1].is_forecast_trusted


async def metrics(cluster) -> str:
    return await (await cluster.http.get("/metrics")).text()


async def status(cluster) -> dict:
    return await (await cluster.http.get("/tetri/status")).json()


@pytest.mark.parametrize("stream", [False, True])
async def test_drift_is_told_to_agents_and_ends_by_itself(cluster, caplog, stream):
    caplog.set_level(logging.WARNING)
    await feed(cluster, 9, BAD, stream=stream)
    assert (await status(cluster))["is_forecast_trusted"] is True
    assert "tetri_forecast_trusted 1.0" in await metrics(cluster)
    await feed(cluster, 1, BAD, stream=stream)
    await cluster.until(lambda: not is_trusted_by_broadcast(cluster))
    assert "length-predictor v3 have drifted: 0.0 % of replies" in caplog.text and "nominal 90.0 %" in caplog.text
    text = await metrics(cluster)
    assert "tetri_forecast_trusted 0.0" in text
    assert 'tetri_forecast_transitions_total{to="history"} 1.0' in text
    (shown,) = (await status(cluster))["forecasts"]
    assert (shown["model"], shown["is_shadow"], shown["is_trusted"]) == ("length-predictor v3", False, False)
    assert (shown["num_observed"], shown["num_samples"], shown["coverage"]) == (10, 0, None)

    await feed(cluster, 9, GOOD, stream=stream)
    assert (await status(cluster))["is_forecast_trusted"] is False
    await feed(cluster, 1, GOOD, stream=stream)
    await cluster.until(lambda: is_trusted_by_broadcast(cluster))
    assert "length-predictor v3 are trusted again: 100.0 % of replies" in caplog.text
    text = await metrics(cluster)
    assert "tetri_forecast_trusted 1.0" in text
    assert 'tetri_forecast_transitions_total{to="model"} 1.0' in text
    assert 'tetri_forecast_observed_total{model="length-predictor v3",shadow="false"} 20.0' in text


async def test_a_shadows_error_is_recorded_and_decides_nothing(cluster):
    shadow = BAD | {"model": "length-predictor v4", "is_shadow": True, "median_tokens": 9}
    await feed(cluster, 15, GOOD, shadow)
    assert (await status(cluster))["is_forecast_trusted"] is True
    text = await metrics(cluster)
    for line in (
        'tetri_forecast_coverage{model="length-predictor v3",shadow="false"} 1.0',
        'tetri_forecast_coverage{model="length-predictor v4",shadow="true"} 0.0',
        'tetri_forecast_nominal_coverage{model="length-predictor v4",shadow="true"} 0.9',
        'tetri_forecast_mae_tokens{model="length-predictor v3",shadow="false"} 1.0',
        'tetri_forecast_mae_tokens{model="length-predictor v4",shadow="true"} 6.0',
        'tetri_forecast_interval_tokens{model="length-predictor v4",shadow="true"} 10.0',
        'tetri_forecast_observed_total{model="length-predictor v4",shadow="true"} 15.0',
    ):
        assert line in text, line
    assert "tetri_forecast_kendall_tau{" not in text  # all means are equal: nothing to rank
    assert [shown["is_shadow"] for shown in (await status(cluster))["forecasts"]] == [False, True]


async def test_the_decode_leg_hears_nothing_of_summaries(cluster):
    await feed(cluster, 1, GOOD)
    tetri = cluster.instances["d0"].legs[0].body["kv_transfer_params"]["tetri"]
    assert "summaries" not in tetri and tetri["request_id"]


@pytest.mark.parametrize("summaries", [3, {}, "x", [None], [{"model": "m"}], [GOOD | {"coverage": 7}], [[GOOD]]])
async def test_malformed_summaries_are_counted_and_ignored(cluster, summaries):
    cluster.instances["p0"].summaries = summaries
    assert (await cluster.complete())[0] == 200
    assert "tetri_forecast_malformed_total 1.0" in await metrics(cluster)
    assert (await status(cluster))["forecasts"] == []


async def test_only_requests_that_ended_well_are_observed(cluster):
    async def fail(stub, request, leg):
        return web.json_response({"error": {"message": "no"}}, status=400)

    cluster.instances["p0"].summaries = [GOOD]
    cluster.instances["d0"].answer = fail
    assert (await cluster.complete())[0] == 400
    cluster.instances["d0"].answer = None
    assert (await cluster.complete(echo=True))[0] == 200  # whole: no forecast was made
    assert (await status(cluster))["forecasts"] == []


async def test_a_length_that_the_client_forced_says_nothing_of_a_forecast(cluster):
    cluster.instances["p0"].summaries = [BAD]
    assert (await cluster.complete(ignore_eos=True, max_tokens=3))[0] == 200
    assert (await status(cluster))["forecasts"] == []


async def test_a_watch_that_is_off_still_measures(bare):
    await bare.stop()
    await bare.start(drift_window=10, drift_band=0)
    await bare.add("p0", Role.PREFILL)
    await bare.add("d0", Role.DECODE)
    await feed(bare, 12, BAD)
    shown = await status(bare)
    assert (shown["is_forecast_trusted"], shown["forecasts"][0]["coverage"]) == (True, 0.0)


def test_a_model_speaks_once_of_a_request_and_summaries_are_bounded():
    forecasts = ForecastMonitor(DriftSettings())
    assert len(forecasts.read([GOOD, BAD], "r")) == 1
    assert len(forecasts.read([GOOD | {"model": f"m{i}"} for i in range(50)], "r")) == MAX_SUMMARIES
    assert forecasts.num_malformed == 1
    assert forecasts.read(None, "r") == () and forecasts.num_malformed == 1


def test_a_model_that_drifted_and_left_is_said(caplog):
    forecasts = ForecastMonitor(DriftSettings.of(0.2, 5))
    bad, other = forecasts.read([BAD], "r"), forecasts.read([GOOD | {"model": "v4"}], "r")
    for _ in range(5):
        forecasts.observe(bad, 3)
    assert not forecasts.is_trusted
    for _ in range(5):
        forecasts.observe(other, 3)
    assert forecasts.is_trusted and "no longer in use" in caplog.text
    assert forecasts.num_transitions == {"history": 1, "model": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drift_band": -0.1}, "drift_band=-0.1"),
        ({"drift_band": 1.0}, "drift_band=1.0: must be between 0 and 1"),
        ({"drift_window": 0}, "drift_window is 0"),
        ({"drift_window": 20_000}, "drift_window=20000: must be 1 to 10000 requests"),
    ],
)
def test_gateway_settings_of_the_watch_are_bounded(changes, words):
    with pytest.raises(ConfigurationError, match=r"^[^\n]*$") as caught:
        GatewaySettings(**changes)
    assert words in str(caught.value)
    assert dataclasses.replace(GatewaySettings(), drift_band=0).drift().enabled is False
