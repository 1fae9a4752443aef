"""Figure 19's requests, forecasts, load table and figures: everything but the engines."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.dispatch import (
    SETTINGS,
    SYSTEMS,
    DispatchResult,
    Extent,
    LoadTable,
    Served,
    dispatch,
    draw,
    figures_of,
    forecast_lengths,
    heavy_to_light,
    kv_balance,
    load_of,
    make_jobs,
)
from serving_plugin.core.config import DispatchSettings, ForecastSettings
from serving_plugin.core.dispatch import DISPATCH_POLICIES
from serving_plugin.engine.dispatcher import Dispatcher
from serving_plugin.engine.load_feed import EngineSnapshot


def snapshot(num_free_blocks: int, num_running: int = 0) -> EngineSnapshot:
    return EngineSnapshot(
        num_running=num_running, num_total_blocks=192, num_free_blocks=num_free_blocks, block_size_tokens=32
    )


def dispatcher(policy: str, *num_free_blocks: int) -> Dispatcher:
    made = Dispatcher(DispatchSettings(policy), ForecastSettings())
    loads = [load_of(f"d{i}", 1, snapshot(free)) for i, free in enumerate(num_free_blocks)]
    made.update(loads, {load.id: load.id for load in loads})
    return made


def test_jobs_are_half_heavy_and_the_same_for_a_seed() -> None:
    extent = Extent()
    jobs = make_jobs(64, extent.heavy_tokens, 1.0, seed=3)
    assert jobs == make_jobs(64, extent.heavy_tokens, 1.0, seed=3)
    lengths = [job.num_output_tokens for job in jobs]
    assert sum(length >= 300 for length in lengths) == sum(length <= 100 for length in lengths) == 32
    assert jobs[0].arrival_s == 0.0
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    assert 0.4 < jobs[-1].arrival_s < 2.5


def test_all_at_once_are_the_same_requests() -> None:
    at_random, at_once = (make_jobs(16, (300, 599), window_s, seed=0) for window_s in (1.0, 0.0))
    assert {job.arrival_s for job in at_once} == {0.0}
    assert Counter(job.num_output_tokens for job in at_once) != Counter()
    assert sum(job.num_output_tokens > 128 for job in at_once) == sum(job.num_output_tokens > 128 for job in at_random)


def test_the_oracle_names_the_true_bucket() -> None:
    jobs = make_jobs(64, (300, 599), 0.0, seed=1)
    for job in jobs:
        forecast = forecast_lengths([job], 1.0, seed=0)[job.id]
        assert forecast.edges_tokens[0] <= job.num_output_tokens < forecast.edges_tokens[1]


def test_noise_names_a_neighbour_as_often_as_asked() -> None:
    jobs = make_jobs(4000, (300, 599), 0.0, seed=1)
    forecasts = forecast_lengths(jobs, 0.749, seed=2)
    off = [forecasts[job.id].edges_tokens[0] // 200 - job.num_output_tokens // 200 for job in jobs]
    assert set(off) == {-1, 0, 1}
    assert off.count(0) / len(off) == pytest.approx(0.749, abs=0.02)


def test_what_an_instance_reports_reaches_the_dispatcher() -> None:
    table = LoadTable()
    assert table.of(["d0"]) == []
    table._take("d0", snapshot(100, num_running=3), [])
    table._take("d0", snapshot(90, num_running=4), [])
    (load,) = table.of(["d0", "d1"])
    assert (load.id, load.sequence, load.num_free_blocks, load.num_active) == ("d0", 2, 90, 4)


def test_requests_that_come_at_once_are_spread_by_promises_alone() -> None:
    jobs = make_jobs(16, (300, 599), 0.0, seed=0)
    forecasts, promised_tokens = forecast_lengths(jobs, 1.0, seed=0), Counter[str]()
    made = dispatcher("least_load", 192, 192)
    for job in jobs:
        instance, meta = dispatch(made, job, forecasts[job.id])
        low, high = meta["length_range"]
        assert low <= job.num_output_tokens < high
        assert meta["is_heavy_decode"] == (job.num_output_tokens > 128)
        promised_tokens[instance] += high
    assert abs(promised_tokens["d0"] - promised_tokens["d1"]) <= 600


@pytest.mark.parametrize("policy", sorted(DISPATCH_POLICIES))
def test_every_policy_chooses_someone(policy: str) -> None:
    jobs = make_jobs(8, (300, 599), 0.0, seed=0)
    forecasts, made = forecast_lengths(jobs, 1.0, seed=0), dispatcher(policy, 192, 192, 192)
    assert {dispatch(made, job, forecasts[job.id])[0] for job in jobs} <= {"d0", "d1", "d2"}


def test_figures_of_a_run() -> None:
    """One instance has all three heavy requests and ends last, the other one has the light ones."""
    jobs = make_jobs(6, (300, 599), 0.0, seed=0)
    heavy = [job.num_output_tokens > 128 for job in jobs]
    sent = {job.id: ("d0" if is_heavy else "d1", 10.0) for job, is_heavy in zip(jobs, heavy, strict=True)}
    served = {
        "d0": Served({job.id: 14.0 for job in jobs if sent[job.id][0] == "d0"}, 3.0, 300.0, 2),
        "d1": Served({job.id: 12.0 for job in jobs if sent[job.id][0] == "d1"}, 1.0, 100.0, 0),
    }
    run = figures_of(jobs, sent, served)
    assert (run["decode_s"], run["mean_jct_s"]) == (4.0, 3.0)
    assert heavy_to_light(run) == 4.0  # (3 + 1) / (0 + 1)
    assert kv_balance(run) == 1.5
    assert run["instances"]["d1"]["num_tokens"] == sum(job.num_output_tokens for job in jobs if sent[job.id][0] == "d1")


def test_an_instance_that_got_nothing_has_ended_at_the_start() -> None:
    jobs = make_jobs(2, (300, 599), 0.0, seed=0)
    served = {"d0": Served({job.id: 3.0 for job in jobs}, 1.0, 10.0, 0), "d1": Served({}, 0.0, 0.0, 0)}
    run = figures_of(jobs, {job.id: ("d0", 1.0) for job in jobs}, served)
    assert run["instances"]["d1"]["done_s"] == 0.0
    assert kv_balance(run) == 2.0


def canned() -> DispatchResult:
    """Two instances; imbalance takes twice as long as everybody else."""
    result = DispatchResult(extent={"num_instances": (2,), "num_requests": 8, "num_rounds": 2, "num_draws": 1})
    for number, (arrivals, pool), (policy, forecasts) in product(range(2), SETTINGS, SYSTEMS):
        slow = 2.0 if policy == "imbalance" else 1.0
        instance = {"num_heavy": 4, "num_light": 4, "cpu_s": slow, "done_s": slow, "block_s": 5.0, "num_preemptions": 0}
        result.runs.append(
            {
                "num_instances": 2, "arrivals": arrivals, "pool": pool, "policy": policy, "forecasts": forecasts,
                "round": number, "decode_s": slow, "mean_jct_s": slow, "instances": {"d0": instance, "d1": instance},
            }
        )  # fmt: skip
    return result


def test_tables_and_picture(tmp_path: Path) -> None:
    result = canned()
    assert result.is_complete
    console = Console(width=200, record=True, file=StringIO())
    for table in result.tables():
        console.print(table)
    text = console.export_text()
    lines = [line for line in text.splitlines() if "│ imbalance" in line]
    assert len(lines) == len(SETTINGS)
    assert all("0.50x [0.50, 0.50]" in line for line in lines)
    assert text.count("on the slowest instance") == 1
    path = tmp_path / "figure.png"
    draw(result, path)
    assert 5_000 < path.stat().st_size < 200_000


def test_a_round_is_the_mean_over_its_draws() -> None:
    result = canned()
    result.runs += [{**run, "decode_s": 3 * run["decode_s"]} for run in result.runs]
    assert result.by_round(lambda run: float(run["decode_s"]), 2, SETTINGS[0], SYSTEMS[0]) == [2.0, 2.0]
    assert not result.is_complete
