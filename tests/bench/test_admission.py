"""The admission benchmark's arithmetic: who is compared with whom, in which turns, and when a goal is met."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import admission
from benchmarks.admission import AT_ONCE, GREEDY, POISSON, SHORT, AdmissionResult, Extent, System, summary, turns_of

OURS = System("reserve_expected", "calibrated").name


def run_of(system: str, number: int, turn: int, core: int, jct_s: float, preemptions: int = 0) -> dict[str, Any]:
    return {
        "part": "at_once", "round": number, "turn": turn, "core": core, "system": system, "mean_jct_s": jct_s,
        "p99_jct_s": 2 * jct_s, "makespan_s": 3 * jct_s, "num_preemptions": preemptions, "num_recomputed_tokens": 0,
    }  # fmt: skip


def rounds_of(ours_s: float, core: int, num_rounds: int = 5, preemptions: int = 1) -> list[dict[str, Any]]:
    """Greedy takes 10 s on core 0 and 5 s on core 1, whatever the policy."""
    return [
        one
        for number in range(num_rounds)
        for one in (
            run_of(GREEDY.name, number, 0, 0, 10.0, 50),
            run_of(GREEDY.name, number, 3, 1, 5.0, 50),
            run_of(OURS, number, 1, core, ours_s, preemptions),
        )
    ]


def row_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    (row,) = (row for row in summary(runs, "at_once") if row["system"] == OURS)
    return row


@pytest.mark.parametrize(("core", "ours_s", "ratio"), [(0, 10.0, 1.0), (1, 5.0, 1.0), (1, 4.0, 0.8)])
def test_a_system_is_compared_with_greedy_on_its_own_core(core: int, ours_s: float, ratio: float) -> None:
    row = row_of(rounds_of(ours_s, core))
    assert row["jct_ratio"] == pytest.approx(ratio) and row["num_pairs"] == 5


def test_the_greedy_runs_before_and_after_are_averaged() -> None:
    runs = [
        run_of(GREEDY.name, 0, turn, 0, jct_s, 10) for turn, jct_s in ((0, 100.0), (1, 10.0), (3, 20.0), (6, 100.0))
    ]
    assert row_of([*runs, run_of(OURS, 0, 2, 0, 15.0)])["jct_ratio"] == pytest.approx(1.0)


def test_a_core_without_greedy_gives_no_pair() -> None:
    runs = [run_of(GREEDY.name, 0, 0, 0, 10.0, 10), run_of(OURS, 0, 1, 1, 5.0)]
    row = row_of(runs)
    assert (row["jct_ratio"], row["num_pairs"], row["goal"]) == (None, 0, "missed")


@pytest.mark.parametrize(
    ("ours_s", "preemptions", "num_rounds", "goal"),
    [
        (9.0, 1, 5, "met"),
        (9.5, 1, 5, "missed"),  # 5 % is not 8 %
        (9.0, 6, 5, "missed"),  # preemptions down 88 %
        (9.0, 1, 4, "missed"),  # too few pairs to say so
    ],
)
def test_both_goals_need_five_pairs(ours_s: float, preemptions: int, num_rounds: int, goal: str) -> None:
    assert row_of(rounds_of(ours_s, 0, num_rounds, preemptions))["goal"] == goal


@pytest.mark.parametrize("systems", [AT_ONCE, POISSON, SHORT.at_once], ids=["at_once", "poisson", "short"])
@pytest.mark.parametrize("width", [1, 2])
def test_everybody_runs_once_and_each_core_has_a_greedy_run(systems: tuple[System, ...], width: int) -> None:
    for number in range(5):
        turns = turns_of(systems, width, number, "at_once")
        ran = [system for turn in turns for system in turn]
        assert sorted(s.name for s in ran if s != GREEDY) == sorted(s.name for s in systems)
        assert all(1 <= len(turn) <= width for turn in turns)
        for core in range(width):
            assert any(len(turn) > core and turn[core] == GREEDY for turn in turns), (number, core)


def test_a_run_goes_on_only_after_one_of_the_same_code_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "UNFINISHED", tmp_path / "unfinished.json")
    fresh = AdmissionResult(model="m", predictor="p", extent=asdict(Extent()), data="d")
    assert admission._continued(fresh) is fresh
    before = asdict(fresh) | {"requests": [{"part": "at_once", "round": 0, "requests": []}]}
    for changes, is_continued in (({}, True), ({"code": "other"}, False), ({"data": "other"}, False)):
        admission.UNFINISHED.write_text(json.dumps(before | changes))
        assert (admission._continued(fresh).requests != []) is is_continued, changes
