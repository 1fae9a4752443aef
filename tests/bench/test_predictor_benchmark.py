"""`python -m benchmarks predictor`: what its tables make of raw figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.predictor import SETTINGS, Extent, PredictorResult, burst_rate, mean_latency


def row(setting: str, number: int, latency_ms: float, burst_s: float) -> dict[str, Any]:
    """Four requests, all alike."""
    return {
        "setting": setting,
        "round": number,
        "latency_ms": [latency_ms] * 4,
        "is_forecast_of_model": [True] * 4,
        "is_burst_forecast_of_model": [True, False] * 2,
        "elapsed_s": 10.0,
        "burst_s": burst_s,
    }


def result(*rows: dict[str, Any]) -> PredictorResult:
    return PredictorResult(model="p version 1", extent=asdict(Extent()), co_running=list(rows))


def test_changes_are_paired_by_round() -> None:
    # the second round is twice as slow for both: pairs cancel it out
    name = SETTINGS[1].name
    found = result(row("none", 0, 100, 1), row(name, 0, 110, 1.25), row(name, 1, 220, 2.5), row("none", 1, 200, 2))
    assert burst_rate(found.co_running[1]) == pytest.approx(3.2)
    assert found.change(name, mean_latency) == "+10.0% [+10.0%, +10.0%]"
    assert found.change(name, burst_rate) == "-20.0% [-20.0%, -20.0%]"
    assert found.change("none", burst_rate) == "-"


def test_one_round_shows_no_bounds() -> None:
    name = SETTINGS[1].name
    found = result(row("none", 0, 100, 1), row(name, 0, 110, 1.25))
    assert found.change(name, burst_rate) == "-20.0%"
    *_, table = found.tables()
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["requests/s, all at once"] == ["4.00", "3.20"]
    assert cells["against none"] == ["-", "-20.0%"]
    assert cells["forecasts in time, Poisson / burst"] == ["-", "100% / 50%"]
