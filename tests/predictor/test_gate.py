"""Who may become champion."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.evaluation.bootstrap import Interval
from serving_plugin.predictor.gate import (
    ChampionComparison,
    NotCompared,
    RowScores,
    Verdict,
    compare,
    decide,
)


def report(**gains: tuple[float | None, float | None, float | None]) -> dict[str, Any]:
    """A good candidate, with other gains where they are given."""
    all_gains = {
        "modal": (0.13, 0.07, 0.19),
        "marginal": (0.2, 0.1, 0.3),
        "tfidf_linear": (0.02, -0.02, 0.06),
        "gradient_boosting": (-0.01, -0.04, 0.02),
        **gains,
    }
    return {
        "accuracy_200": 0.53,
        "baselines": {
            name: {"accuracy_200": 0.5, "gain": {"accuracy_200": dict(zip(("value", "low", "high"), g, strict=True))}}
            for name, g in all_gains.items()
        },
    }


def versus(accuracy: tuple[float, float, float], crps: tuple[float, float, float]) -> ChampionComparison:
    return ChampionComparison("3", 376, Interval(*accuracy), Interval(*crps))


def test_good_candidate_without_champion_passes() -> None:
    assert decide(report(), 200) == Verdict(True, ())


@pytest.mark.parametrize(
    ("gains", "reason"),
    [
        ({"modal": (0.01, -0.02, 0.04)}, "accuracy 0.530 at 200 tokens does not beat baseline modal (0.520)"),
        ({"modal": (-0.1, -0.2, -0.01)}, "-0.100 [-0.200, -0.010] is not above zero"),
        ({"marginal": (0.02, 0.0, 0.04)}, "does not beat baseline marginal"),
        ({"modal": (0.1, None, None)}, "evaluate.num_bootstrap"),
        ({"tfidf_linear": (-0.05, -0.08, -0.02)}, "is worse than baseline tfidf_linear (0.580): gain -0.050"),
        ({"plain_cross_entropy": (-0.05, -0.08, -0.02)}, "is worse than baseline plain_cross_entropy"),
    ],
)
def test_each_baseline_can_stop_it(gains: dict[str, Any], reason: str) -> None:
    verdict = decide(report(**gains), 200)
    assert not verdict.is_champion
    assert len(verdict.reasons) == 1
    assert reason in verdict.reasons[0]


@pytest.mark.parametrize(
    ("comparison", "reasons"),
    [
        (versus((0.02, -0.01, 0.05), (1.0, -2.0, 4.0)), ()),  # better in accuracy only
        (versus((-0.02, -0.05, 0.01), (-1.0, -4.0, 2.0)), ()),  # better in CRPS only
        (
            versus((-0.05, -0.08, -0.02), (-1.0, -4.0, 2.0)),
            ("accuracy at 200 tokens is worse than champion version 3",),
        ),
        (versus((0.02, -0.01, 0.05), (5.0, 2.0, 8.0)), ("CRPS is worse than champion version 3",)),
        (
            versus((-0.05, -0.08, -0.02), (5.0, 2.0, 8.0)),
            ("accuracy at 200 tokens is worse", "+5.0 [+2.0, +8.0] tokens"),
        ),
        (versus((0.0, -0.03, 0.03), (0.3, -2.0, 3.0)), ("no better than champion version 3 on the same 376 rows",)),
    ],
)
def test_champion_in_office(comparison: ChampionComparison, reasons: tuple[str, ...]) -> None:
    verdict = decide(report(), 200, comparison)
    assert verdict.is_champion == (not reasons)
    assert len(verdict.reasons) == len(reasons)
    for said, expected in zip(verdict.reasons, reasons, strict=True):
        assert expected in said


def test_champion_that_holds_office_is_replaced_by_hand_only() -> None:
    verdict = decide(report(), 200, NotCompared("2", "it is for target 'a'", holds_office=True))
    assert verdict == Verdict(False, ("not compared with champion version 2: it is for target 'a'",))


def test_champion_that_cannot_be_loaded_is_named_and_does_not_decide() -> None:
    other = NotCompared("2", "it cannot be loaded")
    verdict = decide(report(), 200, other)
    assert verdict == Verdict(True, ("not compared with champion version 2: it cannot be loaded",))
    worse = decide(report(modal=(0.0, -0.1, 0.1)), 200, other)
    assert (worse.is_champion, worse.is_worse) == (False, True)


def test_allow_worse_forces_and_says_so() -> None:
    verdict = decide(report(modal=(0.0, -0.1, 0.1)), 200, versus((-0.1, -0.2, -0.05), (0, -1, 1)), allow_worse=True)
    assert verdict.is_champion
    assert "register.allow_worse" in verdict.reasons[0]
    assert len(verdict.reasons) == 3
    assert decide(report(), 200, allow_worse=True).reasons == ()
    forced = decide(report(), 200, NotCompared("2", "other splits", holds_office=True), allow_worse=True)
    assert (forced.is_champion, forced.is_worse) == (True, False)


@pytest.mark.parametrize(
    "broken",
    [
        {"accuracy_200": 0.5},
        {"accuracy_200": 0.5, "baselines": {}},
        {"accuracy_200": 0.5, "baselines": {"modal": {"accuracy_200": 0.4}}},
        {"accuracy_200": 0.5, "baselines": {"modal": {"gain": {"accuracy_200": {"value": None}}}}},
        {"baselines": report()["baselines"]},
        {"accuracy_200": 0.5, "baselines": {"modal": {"gain": {"accuracy_200": 0.1}}}},
        {"accuracy_200": None, "baselines": report()["baselines"]},
    ],
)
def test_report_without_what_it_needs_names_the_stage(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="dvc repro evaluate"):
        decide(broken, 200)


def test_verdict_survives_its_tag() -> None:
    for verdict in (Verdict(False, ("größer", "zwei"), is_worse=True), Verdict(False, ("offen",)), Verdict(True)):
        assert Verdict.from_json(verdict.to_json(comparison={"x": 1})) == verdict
    earlier = '{"is_champion": false, "reasons": ["x"]}'
    assert Verdict.from_json(earlier) == Verdict(False, ("x",), is_worse=True)
    for text in ("", "{}", "[]", "null", "worse"):
        assert Verdict.from_json(text) is None


def test_comparison_is_paired_by_row() -> None:
    rng = np.random.default_rng(0)
    ids = tuple(f"c{i // 2}:{i % 2}" for i in range(200))
    roots = tuple(f"c{i // 2}" for i in range(200))
    crps = rng.gamma(2, 50, 200)
    hits = rng.random(200) < 0.5
    champion = RowScores(ids, roots, np.zeros(200), hits, crps)
    candidate = RowScores(ids, roots, np.zeros(200), hits | (rng.random(200) < 0.1), crps - 1.0)
    found = compare("3", candidate, champion)
    assert found.crps_difference_tokens == Interval(*(pytest.approx(-1.0) for _ in range(3)))
    assert 0 < found.accuracy_gain.low <= found.accuracy_gain.value
    assert found.num_rows == 200
    with pytest.raises(ValueError, match="same rows"):
        compare("3", candidate, RowScores(ids[::-1], roots, np.zeros(200), hits, crps))


def test_gate_imports_no_heavy_library() -> None:
    code = (
        "import sys, serving_plugin.predictor.gate\n"
        "print([name for name in ('mlflow', 'onnxruntime', 'evaluate', 'torch', 'scipy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
