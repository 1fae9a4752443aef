"""`python -m benchmarks interference`: its jobs, and what its tables and plots make of raw rows."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.engines import change_text, in_turn, ratio_text
from benchmarks.interference import SHORT, Extent, arrivals, gaps_ms, newcomers, prompt
from benchmarks.interference_report import (
    ALL_LIGHT,
    APART,
    BALANCED,
    CASES,
    CHUNKED,
    COUPLED,
    HALF_HEAVY,
    HEAVY_CONTEXT_TOKENS,
    HEAVY_TOKENS,
    IMBALANCED,
    LIGHT_CONTEXT_TOKENS,
    LIGHT_TOKENS,
    QUEUES,
    SYSTEMS,
    InterferenceResult,
    draw,
    kv_imbalance,
    slowest_step_ms,
    step_std_ms,
    tokens_per_s,
)

LONGEST_GAP_MS = {COUPLED: 400.0, CHUNKED: 120.0, APART: 44.0}  # of decodes whose step is 40 ms


def batch(number: int, layout: str, instance: int, step_ms: float, num_kv_blocks: int) -> dict[str, Any]:
    """Ten steps of 4 tokens."""
    return {
        "round": number, "layout": layout, "instance": instance, "num_light": 2, "num_heavy": 2,
        "step_ms": [step_ms] * 10, "num_tokens": 40, "num_kv_blocks": num_kv_blocks, "num_total_blocks": 1000,
    }  # fmt: skip


def beside(system: str, number: int, context: int, num_decodes: int, newcomer: int) -> dict[str, Any]:
    """A newcomer that takes 10 % longer per running decode; round 1 is twice as slow in all."""
    slow = 1 + number
    prefill_ms = slow * newcomer * (1 + 0.1 * num_decodes)
    return {
        "system": system, "round": number, "decode_context_tokens": context, "num_decodes": num_decodes,
        "newcomer_tokens": newcomer, "prefill_ms": [prefill_ms], "first_token_ms": [prefill_ms + 50],
        "before_ms": [39.0 * slow, 40.0 * slow, 41.0 * slow] if num_decodes else [],
        "during_ms": [40.0 * slow, LONGEST_GAP_MS[system] * slow] if num_decodes else [],
    }  # fmt: skip


@pytest.fixture
def result() -> InterferenceResult:
    """Two rounds; in figure 3 every prompt of a queue waits for the whole queue, a millisecond a token."""
    found = InterferenceResult(model="a model", extent=asdict(SHORT))
    for number in (0, 1):
        for system in SYSTEMS:
            for queue, lengths in QUEUES.items():
                latency_ms = [float(sum(lengths) * (1 + number))] * len(lengths)
                found.prefill_prefill.append(
                    {"system": system, "round": number, "queue": queue, "latency_ms": latency_ms}
                )
            for num_decodes in SHORT.num_decodes:
                for newcomer in (LIGHT_TOKENS, HEAVY_TOKENS):
                    found.prefill_decode.append(beside(system, number, LIGHT_CONTEXT_TOKENS, num_decodes, newcomer))
            found.prefill_decode.append(beside(system, number, HEAVY_CONTEXT_TOKENS, 1, HEAVY_TOKENS))
            gap_ms = [40.0] * 90 + [LONGEST_GAP_MS[system]] * 10
            found.mixed.append({"system": system, "round": number, "gap_ms": gap_ms, "first_token_ms": [100.0]})
        found.decode_decode += [
            batch(number, ALL_LIGHT, 0, 40, 8), batch(number, HALF_HEAVY, 0, 50, 60),
            batch(number, BALANCED, 0, 50, 60), batch(number, BALANCED, 1, 50, 60),
            batch(number, IMBALANCED, 0, 40, 10), batch(number, IMBALANCED, 1, 60, 110),
        ]  # fmt: skip
    return found


def cells(table: Table) -> list[tuple[str, ...]]:
    """Rows of a table as text."""
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))


def test_every_line_of_the_paper_is_there_with_its_ratio(result: InterferenceResult) -> None:
    prefills, steps, newcomer, mixed, batches, spread = map(cells, result.tables())
    assert ("light with 7 light", "last", "2x", *["8.00x [8.00, 8.00]"] * 3) in prefills
    assert len(prefills) == 2 * len(CASES) - 1
    assert steps[0] == (
        "1 light", "longest", "5x", "10.00x [10.00, 10.00]", "3.00x [3.00, 3.00]", "1.10x [1.10, 1.10]",
    )  # fmt: skip
    assert steps[-1][:3] == ("1 heavy", "mean", "-")
    assert newcomer[0][:4] == ("light", "1", "slower beyond 7 decodes", "1.10x [1.10, 1.10] 30 ms")
    assert mixed[0] == (
        "coupled", "40.0", "400.0", "400.0", "108.0", "10.00", "1.42",
        "0.11x [0.11, 0.11]", "0.02x [0.02, 0.02]", "100",
    )  # fmt: skip
    assert mixed[2][-3:] == ("-", "-", "100")
    assert batches[1] == (
        "half heavy", "80.0", "-20.0 % [-20.0, -20.0]", "-16 %", "50.0", "+25.0 % [+25.0, +25.0]", "+23 %",
    )  # fmt: skip
    assert spread[2][2] == "1.20x [1.20, 1.20]"
    assert spread[1][-1] == "1.83"


def test_only_a_result_with_every_part_is_complete(result: InterferenceResult) -> None:
    assert result.is_complete
    result.mixed = []
    assert not result.is_complete


def test_plot_is_small(result: InterferenceResult, tmp_path: Path) -> None:
    draw(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "plot.png").stat().st_size < 200_000


def test_figures_of_two_instances() -> None:
    even = [batch(0, BALANCED, 0, 50, 60), batch(0, BALANCED, 1, 50, 60)]
    uneven = [batch(0, IMBALANCED, 0, 40, 10), batch(0, IMBALANCED, 1, 60, 110)]
    assert tokens_per_s(even) == pytest.approx(160)
    assert (slowest_step_ms(even), slowest_step_ms(uneven)) == (50, 60)
    assert (step_std_ms(even), step_std_ms(uneven)) == (0, 10)
    assert kv_imbalance(even) == 1
    assert kv_imbalance(uneven) == pytest.approx(110 / 60)


def test_gaps_are_those_that_end_in_the_interval() -> None:
    times_s = [0.0, 0.5, 1.0, 3.0, 3.5]
    assert gaps_ms(times_s, 0.5, 3.0) == [500, 2000]
    assert gaps_ms(times_s[:1], 0, 9) == []


def test_newcomers_of_a_round_are_the_same_for_every_system_but_for_their_ids() -> None:
    one, two, other = arrivals(Extent(), 0), arrivals(Extent(), 0), arrivals(Extent(), 1)
    assert [(job.arrival_s, job.prompt_token_ids) for job in one] == [
        (job.arrival_s, job.prompt_token_ids) for job in two
    ]
    assert not {job.id for job in one} & {job.id for job in two}
    assert [job.arrival_s for job in one] != [job.arrival_s for job in other]
    assert all(job.arrival_s < Extent().mixed_s for job in one)
    assert {len(job.prompt_token_ids) for job in one} == {LIGHT_TOKENS, HEAVY_TOKENS}


def test_a_mixed_run_always_has_a_heavy_newcomer() -> None:
    for seed in range(50):
        assert HEAVY_TOKENS in {len(job.prompt_token_ids) for job in arrivals(SHORT, seed)}


def test_jobs_keep_their_prompts_and_times() -> None:
    first, second = newcomers([18, 512], [0.5, 1.5])
    assert (len(first.prompt_token_ids), len(second.prompt_token_ids)) == (18, 512)
    assert (first.arrival_s, second.arrival_s) == (0.5, 1.5)
    assert prompt(20, 1) == prompt(20, 1) != prompt(20, 2)


def test_systems_take_turns() -> None:
    assert in_turn(("a", "b", "c"), 0) == ["a", "b", "c"]
    assert in_turn(("a", "b", "c"), 1) == ["c", "b", "a"]


def test_ratios_are_paired_by_round_and_bounded_from_two_rounds_on() -> None:
    assert ratio_text([2, 4], [1, 2]) == "2.00x [2.00, 2.00]"  # the second round is twice as slow for both
    assert ratio_text([3], [2]) == "1.50x"
    assert change_text([3], [2]) == "+50.0 %"
    assert ratio_text([], []) == "-"


def test_tables_fit_the_console(result: InterferenceResult) -> None:
    console = Console(width=140, record=True, file=StringIO())
    for table in result.tables():
        console.print(table)
    assert "…" not in console.export_text()
