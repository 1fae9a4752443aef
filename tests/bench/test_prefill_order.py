"""`python -m benchmarks prefill_order`: what its tables and plot make of raw rows."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.prefill_order import (
    COMPARISONS,
    FCFS,
    FIXED,
    LJF,
    PADDED,
    SHORT,
    SJF,
    SYSTEMS,
    WIDER,
    PrefillOrderResult,
    draw,
    ordering_us,
    padded_latency_ms,
)
from serving_plugin.core.types import Role


def row(system: str, number: int, latency_ms: float, waiting_ms: float) -> dict[str, Any]:
    """Two prompts; round 1 is twice as slow in all."""
    slow = 1 + number
    return {
        "system": system, "round": number, "latency_ms": [slow * latency_ms * share for share in (0.5, 1.5)],
        "waiting_ms": [slow * waiting_ms] * 2, "total_ms": 2000.0 * slow, "scheduler_us": [80.0, 100.0, 120.0],
    }  # fmt: skip


@pytest.fixture
def result() -> PrefillOrderResult:
    latency_ms = {FIXED: 1000.0, FCFS: 900.0, SJF: 810.0, LJF: 990.0, **dict.fromkeys(WIDER, 405.0)}
    rows = [
        row(system.name, number, ms, ms - 100)
        for number in (1, 0)
        for system, ms in latency_ms.items()
    ]  # fmt: skip
    return PrefillOrderResult(
        model="a model",
        source="prompts",
        extent=asdict(SHORT),
        prompts_tokens=[[100, 300], [100, 300]],
        rows=rows,
        ordering_us={system.name: 5.0 for system in SYSTEMS if system.order},
    )


def cells(table: Table) -> list[tuple[str, ...]]:
    """Rows of a table as text."""
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))


def test_the_paper_s_claims_beside_ours(result: PrefillOrderResult) -> None:
    systems, claims = map(cells, result.tables())
    assert systems[0] == ("fixed batch of 16", "1.50", "1.50", "2.23", "1.35", "3.00", "100", "-")
    assert [line[0] for line in systems] == [system.name for system in SYSTEMS]
    assert len(claims) == len(COMPARISONS) + 1
    assert claims[-1] == (PADDED, "latency", "-86.4 %", "-70.0 % [-70.0, -70.0]")  # 900 ms against 600 of 400 tokens
    assert claims[0][2:] == ("-86.4 %", "-10.0 % [-10.0, -10.0]")
    assert claims[1][2] == "-7.8 %" and claims[1][3].startswith("-11.")  # 710 ms of waiting against 800
    assert claims[2][2:] == ("-46.5 %", "-50.0 % [-50.0, -50.0]")
    assert claims[3][2:] == ("worse", "+10.0 % [+10.0, +10.0]")


def test_figures_come_in_the_order_of_rounds(result: PrefillOrderResult) -> None:
    assert result.figures(FIXED, "latency") == [1000, 2000]
    assert result.figures(FIXED, "total") == [2000, 4000]
    assert result.is_complete
    result.rows = []
    assert not result.is_complete


def test_tables_fit_the_console(result: PrefillOrderResult) -> None:
    console = Console(width=140, record=True, file=StringIO())
    for table in result.tables():
        console.print(table)
    assert "…" not in console.export_text()


def test_plot_is_small(result: PrefillOrderResult, tmp_path: Path) -> None:
    draw(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "plot.png").stat().st_size < 200_000


def test_every_system_but_the_baseline_is_a_prefill_instance() -> None:
    assert FIXED.settings is None
    for system in SYSTEMS[1:]:
        assert system.settings is not None and system.order is not None
        assert system.settings.role is Role.PREFILL
        assert system.settings.order is system.order
        assert system.name == f"{system.order.policy.upper()} {system.order.sched_batch}"


def test_forming_a_round_takes_time() -> None:
    assert SJF.order is not None
    assert 0 < ordering_us(SJF.order, [[1] * n for n in range(1, 129)]) < 1e6


def test_a_padded_batch_costs_its_longest_prompt_sixteen_times() -> None:
    lengths = [10] * 15 + [850] + [20] * 16  # 1,320 tokens; padded 13,600, then 320 more
    assert padded_latency_ms(lengths, 1320.0) == pytest.approx((13600 + 13920) / 2)
    assert padded_latency_ms([7] * 16, 112.0) == pytest.approx(112)
