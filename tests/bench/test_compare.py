"""The comparison from end to end with stub servers in processes of their own, and the reports made of it."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from serving_plugin.bench import compare, systems
from serving_plugin.bench.compare import (
    BenchResult,
    MeasureOptions,
    Session,
    TuneStep,
    all_ratios,
    best_chunk,
    plan_sessions,
)
from serving_plugin.bench.console import ConsoleWatcher, require_writable
from serving_plugin.bench.report import render_table, system_figures, table_rows, write_atomically, write_json
from serving_plugin.bench.report_html import cdf_png, cdf_svg, render_html, write_html
from serving_plugin.bench.session import Comparison, WorkloadOptions, bench_compared, draw_workloads
from serving_plugin.bench.systems import Hardware, SystemName, SystemPlan, SystemSettings
from serving_plugin.bench.workloads import WorkloadName
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.processes import ChildSpec

A, B, C = SystemName.TETRISERVE, SystemName.COUPLED, SystemName.SINGLE
STUB = Path(__file__).parent / "stub_openai.py"


def test_order_is_turned_round_and_neighbours_share_a_start():
    assert plan_sessions([A, B, C], 3) == [
        Session(A, (0,)),
        Session(B, (0,)),
        Session(C, (0, 1)),
        Session(B, (1,)),
        Session(A, (1, 2)),
        Session(B, (2,)),
        Session(C, (2,)),
    ]
    assert plan_sessions([A], 2) == [Session(A, (0, 1))]


def test_best_chunk_prefers_no_errors_then_the_lowest_jct():
    steps = [TuneStep(64, 5.0, 0.1, 0), TuneStep(128, 4.0, 0.1, 0), TuneStep(256, 3.0, 0.1, 2)]
    assert best_chunk(steps) == 128
    with pytest.raises(ConfigurationError, match="no chunk size"):
        best_chunk([TuneStep(64, float("inf"), None, 8)])


@pytest.fixture(scope="module")
def result(chats_path, model_folder, tmp_path_factory) -> BenchResult:
    """Two seeds on three systems and a tuning sweep, every server a stub."""
    logs = tmp_path_factory.mktemp("logs")

    def plan(name: SystemName, settings: SystemSettings, ports: list[int]) -> SystemPlan:
        used = ports[: 2 if name is B else 1]
        children = tuple(
            ChildSpec(f"{name}-{p}", (sys.executable, str(STUB), str(p)), logs / f"{name}-{p}.log", {}) for p in used
        )
        urls = tuple(f"http://127.0.0.1:{p}" for p in used)
        names = tuple(f"{name}-{i}" for i in range(len(used)))
        return SystemPlan(name, f"stub of {name}", children, urls, names, settings.chunk_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "plan_system", plan)
        settings = SystemSettings(model_folder, Hardware((0, 1)), 512, log_folder=logs)
        work = WorkloadOptions((WorkloadName.MIXED,), (0, 1), 8, 100.0, source=str(chats_path), max_output_tokens=40)
        with ConsoleWatcher(Console(stderr=True, quiet=True)) as watcher:
            workloads = draw_workloads(work, model_folder, 512, watcher)
            return bench_compared(
                Comparison((A, B, C), (64, 128)), workloads, settings, MeasureOptions(num_warm_up=1), watcher
            )


def test_every_system_gets_the_same_requests(result):
    assert len(result.runs) == 6
    for repetition in (0, 1):
        work = {
            tuple((r.num_prompt_tokens, r.num_output_tokens) for r in run.records)
            for run in result.runs
            if run.repetition == repetition
        }
        assert len(work) == 1
    assert all(run.metrics.num_ok == 8 and run.peak_resident_bytes for run in result.runs)
    coupled = [run for run in result.runs if run.system == B]
    assert {r.decode_instance for run in coupled for r in run.records} == {"coupled-0", "coupled-1"}


def test_ratios_are_paired_by_repetition(result):
    assert [(r.ours, r.theirs) for r in result.ratios] == [(A, B), (A, C)]
    ratios = result.ratios[0]
    assert ratios.mean_jct is not None and len(ratios.mean_jct.ratios) == 2
    mine = next(run for run in result.runs if (run.system, run.repetition) == (A, 0))
    other = next(run for run in result.runs if (run.system, run.repetition) == (B, 0))
    assert ratios.mean_jct.ratios[0] == pytest.approx(mine.metrics.jct_s.mean / other.metrics.jct_s.mean)
    assert ratios.perf_per_dollar.ratios[0] == pytest.approx(1 / ratios.resource_time.ratios[0])
    assert all_ratios([run for run in result.runs if run.system != A]) == []


def test_tuning_is_recorded(result):
    assert [step.chunk_tokens for step in result.tuning] == [64, 128]
    assert result.settings["chunk_tokens"] == best_chunk(result.tuning)


def test_json_holds_every_raw_figure(result, tmp_path):
    path = tmp_path / "new" / "out.json"
    write_json(result, path)
    loaded = json.loads(path.read_text())
    assert loaded["format"] == 1 and loaded["command"] and loaded["machine"]["num_cores"] >= 1
    assert len(loaded["runs"][0]["records"][0]["token_times_s"]) == loaded["runs"][0]["records"][0]["num_output_tokens"]
    assert loaded["ratios"][0]["perf_per_dollar"]["ratios"]
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


def test_terminal_table_names_systems_and_metrics(result):
    console = Console(width=120, file=io.StringIO())
    console.print(render_table(result))
    text = console.file.getvalue()
    for word in (
        "tetriserve",
        "coupled",
        "single",
        "TTFT mean",
        "ITL p99",
        "JCT p50",
        "resource time",
        "perf/$",
        "makespan",
    ):
        assert word in text
    jct = next(row for row in table_rows(result, "mixed") if (row.group, row.label) == ("JCT", "mean"))
    assert all(value in text for value in jct.values)


def test_html_holds_the_numbers_the_plots_and_the_command(result, tmp_path):
    path = tmp_path / "report.html"
    write_html(result, path)
    page = path.read_text()
    assert page.count("<svg") == 1 and "TTFT (s)" in page and "ITL (ms)" in page
    for row in table_rows(result, "mixed"):
        assert all(value in page for value in row.values)
    assert "2.4x" not in page and "1.9x printed, 1.27x implied" in page
    assert "http://www.w3.org" in page and "src=" not in page and "<link" not in page
    assert render_html(result) == page


def test_a_failed_request_shows_in_both_reports(result):
    run = result.runs[0]
    broken = replace(run.records[0], outcome="error", error="<decode> lost", token_times_s=(), first_token_s=None)
    runs = (replace(run, records=(broken, *run.records[1:])), *result.runs[1:])
    changed = replace(result, runs=runs)
    assert "1 of 8 requests failed, first: &lt;decode&gt; lost" in render_html(changed)
    assert "1 of 8 requests failed" in render_table(changed).caption
    sent = next(row for row in table_rows(changed, "mixed") if row.group == "finished / sent")
    assert sent.values[0] == "15 / 16"


def test_plots_survive_systems_without_samples(result):
    empty = [replace(f, records=()) for f in system_figures(result, "mixed")]
    assert cdf_svg(empty, "x").startswith("<svg")
    assert cdf_png(system_figures(result, "mixed")).startswith(b"\x89PNG")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.html"
    path.write_text("old")

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigurationError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_outputs_are_checked_before_the_work(tmp_path):
    require_writable(None, tmp_path / "deep" / "er" / "a.json")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        require_writable(tmp_path)


def test_executable_must_be_in_this_environment():
    with pytest.raises(ConfigurationError, match="no-such-command is missing"):
        systems.executable("no-such-command")
