"""Metrics against figures worked out by hand, and properties of interval unions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.bench.metrics import (
    PAPER_RESULTS,
    Slo,
    bootstrap_mean_interval,
    busy_intervals,
    gaps_s,
    is_good,
    jct_s,
    measure,
    paired_ratio,
    resource_time_by_instance_s,
    summarise,
    tpot_s,
    ttft_s,
    union_length_s,
)
from serving_plugin.core.types import Outcome, RequestRecord


def record(times: tuple[float, ...], arrival_s: float = 0.0, **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "id": "r",
        "arrival_s": arrival_s,
        "num_prompt_tokens": 10,
        "num_output_tokens": len(times),
        "outcome": Outcome.OK,
        "first_token_s": times[0] if times else None,
        "last_token_s": times[-1] if times else None,
        "token_times_s": times,
        "prefill_instance": "a",
        "decode_instance": "a",
    }
    return RequestRecord(**(fields | changes))


def test_latencies_of_one_request():
    one = record((11.0, 12.5, 13.0), arrival_s=10.0)
    assert (ttft_s(one), jct_s(one), tpot_s(one)) == (1.0, 3.0, 1.0)
    assert gaps_s(one) == [1.5, 0.5]


def test_a_failed_request_has_no_jct_and_one_token_no_tpot():
    failed = record((11.0,), arrival_s=10.0, outcome=Outcome.ERROR)
    assert jct_s(failed) is None and ttft_s(failed) == 1.0
    assert tpot_s(record((11.0,), arrival_s=10.0)) is None
    assert ttft_s(record((), outcome=Outcome.ERROR)) is None


def test_a_run():
    records = [
        record((1.0, 2.0, 4.0), 0.0),
        record((3.0, 4.0), 1.0),
        record((), 2.0, outcome=Outcome.ERROR, prefill_instance=None, decode_instance=None),
        record((), 2.0, outcome=Outcome.REJECTED, prefill_instance=None, decode_instance=None),
    ]
    run = measure(records, Slo(ttft_s=1.5))
    assert (run.num_requests, run.num_ok, run.num_errors, run.num_rejected) == (4, 2, 1, 1)
    assert run.ttft_s is not None and (run.ttft_s.mean, run.ttft_s.p50, run.ttft_s.max) == (1.5, 1.5, 2.0)
    assert run.itl_s is not None and run.itl_s.mean == pytest.approx(4 / 3) and run.itl_s.count == 3
    assert run.first_gap_s is not None and run.first_gap_s.mean == 1.0
    assert run.jct_s is not None and run.jct_s.mean == 3.5
    assert (run.makespan_s, run.resource_time_s, run.output_tokens_per_s) == (4.0, 4.0, 1.25)
    assert run.good_share == 0.25


def test_nothing_finished_gives_no_figures_and_no_crash():
    run = measure([record((), outcome=Outcome.ERROR)])
    assert run.ttft_s is None and run.itl_s is None and run.makespan_s is None and run.resource_time_s is None


def test_percentiles_interpolate():
    summary = summarise(range(101))
    assert summary is not None and (summary.p50, summary.p90, summary.p99) == (50.0, 90.0, 99.0)
    assert summary.mean_low < 50 < summary.mean_high
    assert summarise([]) is None


SPLIT = {"prefill_instance": "p", "decode_instance": "d", "dispatch_s": 2.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (SPLIT | {"transfer_end_s": 2.5}, {"p": [(0.0, 2.5)], "d": [(2.0, 9.0)]}),
        (SPLIT, {"p": [(0.0, 3.0)], "d": [(2.0, 9.0)]}),
        (SPLIT | {"dispatch_s": None, "prefill_end_s": 1.5}, {"p": [(0.0, 3.0)], "d": [(1.5, 9.0)]}),
        (SPLIT | {"decode_instance": None}, {"p": [(0.0, 9.0)]}),
        ({"prefill_instance": "a", "decode_instance": "a"}, {"a": [(0.0, 9.0)]}),
        ({"prefill_instance": None, "decode_instance": None}, {}),
    ],
)
def test_busy_intervals(changes, expected):
    assert busy_intervals(record((3.0, 9.0), **changes)) == expected


def test_resource_time_is_the_union_per_instance():
    records = [
        record((3.0, 9.0), 0.0, **SPLIT, transfer_end_s=2.5),
        record((4.0, 8.0), 1.0, **(SPLIT | {"dispatch_s": 3.0}), transfer_end_s=3.5),
        record((21.0, 22.0), 20.0, **(SPLIT | {"dispatch_s": 20.5}), transfer_end_s=20.75),
    ]
    assert resource_time_by_instance_s(records) == {"d": 7.0 + 1.5, "p": 3.5 + 0.75}


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(INTERVALS)
def test_union_counts_every_covered_second_once(intervals):
    covered = {second for start, stop in intervals for second in range(start, stop)}
    assert union_length_s([(float(a), float(b)) for a, b in intervals]) == len(covered)


@given(INTERVALS, st.randoms())
def test_union_does_not_depend_on_order_or_repetition(intervals, rng):
    spans = [(float(a), float(b)) for a, b in intervals]
    shuffled = spans * 2
    rng.shuffle(shuffled)
    assert union_length_s(shuffled) == union_length_s(spans)


def test_bootstrap_interval_covers_the_mean_and_repeats():
    sample = np.random.default_rng(1).exponential(2.0, 400)
    low, high = bootstrap_mean_interval(sample)
    assert low < sample.mean() < high and high - low < 1.0
    assert bootstrap_mean_interval(sample) == (low, high)
    large = np.random.default_rng(1).exponential(2.0, 40_000)  # normal approximation
    low, high = bootstrap_mean_interval(large)
    assert low < large.mean() < high and high - low == pytest.approx(2 * 1.96 * 2.0 / 200, rel=0.1)


def test_paired_ratio():
    five = paired_ratio([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 5.0, 8.0, 10.0])
    assert five is not None and five.mean == pytest.approx(0.52)
    assert five.lower_95 is not None and five.upper_95 is not None
    assert 0.5 <= five.lower_95 <= 0.52 <= five.upper_95 <= 0.6
    assert five.meets(0.7) and not five.meets(0.51)
    one = paired_ratio([1.0], [2.0])
    assert one is not None and one.upper_95 is None and not one.meets(0.7)
    assert paired_ratio([], []) is None
    with pytest.raises(ValueError, match="not pairs"):
        paired_ratio([1.0], [])


def test_good_needs_every_limit():
    one = record((1.0, 1.5), 0.0)
    assert is_good(one, Slo(1.0, 0.5)) and not is_good(one, Slo(0.9, 0.5)) and not is_good(one, Slo(1.0, 0.4))


def test_the_papers_implied_column_follows_from_its_resource_times():
    for figures in PAPER_RESULTS.values():
        assert figures["resource_time"] is not None
        assert figures["implied"] == pytest.approx(1 / (1 + figures["resource_time"]), abs=0.01)
