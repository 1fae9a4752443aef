"""The overhead benchmark without engines: its sizes, its judgement, its table and picture."""

from __future__ import annotations

from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.overhead import (
    ARRIVING,
    BLOCK_TOKENS,
    NO_QUEUE,
    OURS,
    SHORT,
    SHORT_PROMPT_TOKENS,
    STOCK,
    VETOED,
    Extent,
    OverheadResult,
    _num_tokens_at_end,
    added_share,
    batch_of,
    cases,
    draw,
    pool_blocks,
    run,
    verdict,
)
from serving_plugin.core.admit import ADMIT_POLICIES, ActiveDecode, DecodePool, Newcomer, fits_now
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import num_blocks

FULL = Extent()


def pool_of(extent: Extent, high: int, num_running: int, num_output_tokens: int) -> DecodePool:
    held = num_blocks(SHORT_PROMPT_TOKENS + num_output_tokens, BLOCK_TOKENS)
    active = ActiveDecode(SHORT_PROMPT_TOKENS, num_output_tokens, LengthRange(high - 1, high), held)
    return DecodePool(
        block_size_tokens=BLOCK_TOKENS,
        num_total_blocks=pool_blocks(extent),
        num_free_blocks=pool_blocks(extent) - num_running * held,
        active=(active,) * num_running,
    )


@pytest.mark.parametrize("extent", [FULL, SHORT])
@pytest.mark.parametrize("policy", FULL.policies)
def test_the_whole_batch_is_admitted_and_the_queue_is_vetoed_until_the_end(extent: Extent, policy: str) -> None:
    for num_running in extent.num_running:
        batch = batch_of(extent, num_running)
        high = batch.high_tokens
        likes = LengthRange(high - 1, high)
        assert ADMIT_POLICIES[policy](Newcomer(SHORT_PROMPT_TOKENS, likes), pool_of(extent, high, num_running - 1, 0))
        waiting = Newcomer(batch.waiting_prompt_tokens, likes)
        for num_output_tokens in (1, _num_tokens_at_end(extent) // 2, _num_tokens_at_end(extent) - SHORT_PROMPT_TOKENS):
            pool = pool_of(extent, high, num_running, num_output_tokens)
            assert not ADMIT_POLICIES[policy](waiting, pool)
        assert fits_now(waiting, pool_of(extent, high, num_running, 1))  # it is the policy that refuses it


def test_a_policy_is_measured_without_a_queue_once() -> None:
    found = cases(FULL)
    assert len(found) == len(set(found)) == 3 * (3 + 2 + 2) + 2
    assert {case.policy for case in found if case.condition == NO_QUEUE} == {"reserve_dynamic"}
    assert {case.policy for case in found if case.condition in (VETOED, ARRIVING)} == set(FULL.policies)


def block(scheduler_s: float, duration_s: float) -> dict[str, list[float]]:
    return {"scheduler_s": [scheduler_s] * 8, "duration_s": [duration_s] * 8}


def canned(added_s: float, extent: Extent = FULL) -> OverheadResult:
    """vLLM takes 1 ms of a 40 ms step, ours takes `added_s` more."""
    result = OverheadResult(extent=asdict(extent), models=["tiny"])
    for case in cases(extent):
        result.rows += [
            {
                "model": "tiny", "case": asdict(case), "round": number,
                STOCK: block(0.001, 0.04), OURS: block(0.001 + added_s, 0.04 + 2 * added_s),
            }
            for number in range(extent.num_rounds)
        ]  # fmt: skip
    return result


@pytest.mark.parametrize(("added_s", "expected"), [(0.0004, "met"), (0.002, "missed"), (-0.0001, "met")])
def test_judgement_by_the_bounds(added_s: float, expected: str) -> None:
    result = canned(added_s)
    share = added_share([row for row in result.rows if row["case"] == asdict(cases(FULL)[0])])
    assert share is not None
    assert share.mean == pytest.approx(1 + added_s / 0.04)
    assert verdict(share) == expected


def test_one_round_judges_nothing() -> None:
    share = added_share(canned(0.0004, SHORT).rows[:1])
    assert share is not None
    assert verdict(share) == "open"


def test_table_and_picture(tmp_path: Path) -> None:
    result = canned(0.0004)
    assert result.is_complete
    console = Console(width=140, record=True, file=StringIO())
    for table in result.tables():
        console.print(table)
    (line,) = [line for line in console.export_text().splitlines() if "256" in line and NO_QUEUE in line]
    fields = [part.strip() for part in line.split("│")[1:-1]]
    assert fields == [
        "256 decodes, no queue, reserve_dynamic", "40.0", "1000", "400", "400",
        "+1.00 % [+1.00, +1.00]", "met", "+2.00 % [+2.00, +2.00]",
    ]  # fmt: skip
    path = tmp_path / "figure.png"
    draw(result, path)
    assert 5_000 < path.stat().st_size < 200_000


def test_a_condition_that_brought_nothing_leaves_it_incomplete() -> None:
    result = canned(0.0004)
    assert not replace(result, rows=result.rows[1:]).is_complete


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no model"):
        run(tmp_path / "nothing", is_short=False)
