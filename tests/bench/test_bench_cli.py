"""`tetri bench` and `python -m benchmarks`: a measurement of a running server, and one clear line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS
from benchmarks.__main__ import app as benchmarks_app
from serving_plugin.bench.systems import SystemName, SystemPlan, free_ports, running
from serving_plugin.cli import bench
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.processes import ChildSpec

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stub_openai.py"


@pytest.fixture
def app() -> typer.Typer:
    """`bench` beside another command, as in `tetri`."""
    made = typer.Typer()
    bench.register(made)
    made.command("other")(lambda: None)
    return made


def refusal(app: typer.Typer, *arguments: str) -> str:
    """Message of the `ConfigurationError` that these arguments cause."""
    outcome = CliRunner().invoke(app, list(arguments))
    assert isinstance(outcome.exception, ConfigurationError), outcome.output
    return str(outcome.exception)


def test_measures_a_running_server(app, chats_path, model_folder, tmp_path):
    [port] = free_ports(1)
    child = ChildSpec("stub", (sys.executable, str(STUB), str(port)), tmp_path / "stub.log", {})
    plan = SystemPlan(SystemName.SINGLE, "stub", (child,), (f"http://127.0.0.1:{port}",), ("stub",), None)
    command = ["bench", "--model", str(model_folder), "--base-url", plan.base_urls[0], "--source", str(chats_path)]
    command += ["--workload", "mixed,lpld", "--num-requests", "5", "--rate", "50", "--seeds", "0,1"]
    command += ["--max-output-tokens", "20", "--slo-ttft-s", "10"]
    command += ["--json", str(tmp_path / "out.json"), "--report", str(tmp_path / "out.html")]
    with running(plan, 30):
        outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    assert "TTFT mean" in outcome.output and "MIXED" in outcome.output and "LPLD" in outcome.output
    loaded = json.loads((tmp_path / "out.json").read_text())
    assert [(run["workload"], run["seed"]) for run in loaded["runs"]] == [
        ("mixed", 0), ("lpld", 0), ("mixed", 1), ("lpld", 1),
    ]  # fmt: skip
    assert all(run["metrics"]["num_ok"] == 5 and run["metrics"]["good_share"] == 1.0 for run in loaded["runs"])
    assert "<svg" in (tmp_path / "out.html").read_text()


def test_nothing_served_is_exit_code_1(app, chats_path, model_folder):
    command = ["bench", "--model", str(model_folder), "--base-url", "http://127.0.0.1:9", "--source", str(chats_path)]
    command += ["--served-model-name", "m", "--num-requests", "2", "--max-output-tokens", "8", "--warm-up", "0"]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 1 and "0 / 2" in outcome.output, outcome.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "chat"], "unknown workload 'chat'; known are lpld, lphd, hpld, hphd, mixed"),
        (["--workload", ","], "no workload named"),
        (["--seeds", "a"], "--seeds 'a' is not a list of whole numbers"),
        (["--seeds", "1,1"], "give each seed once"),
        (["--lengths", "free"], "--lengths 'free' is unknown; known are fixed, natural"),
        (["--length-source", "x"], "known are sharegpt, paper"),
        (["--base-url", "localhost"], "--base-url 'localhost' is not an http(s) URL"),
        (["--base-url", "http://127.0.0.1:9", "--compare"], "either --base-url of a running server or --compare"),
        (["--compare", "--systems", "orca"], "unknown system 'orca'"),
        (["--compare", "--systems", "single,single"], "give each system once"),
        (["--compare", "--tune", "x"], "--tune 'x' is not a list"),
        (["--json", "/dev/null/x.json"], "cannot be written"),
        (["--served-model-name", "m", "--source", "/nowhere.json"], "/nowhere.json"),
        (["--base-url", "http://127.0.0.1:9", "--source", "CHATS"], "does not answer"),
    ],
)
def test_bad_input_is_one_line(app, chats_path, model_folder, arguments, message):
    given = [str(chats_path) if a == "CHATS" else a for a in arguments]
    if "--base-url" not in given and "--compare" not in given:
        given += ["--base-url", "http://127.0.0.1:9"]
    text = refusal(app, "bench", "--model", str(model_folder), "--max-output-tokens", "40", *given)
    assert message in text and "\n" not in text


def test_a_missing_model_is_named(app, tmp_path):
    assert "no config.json" in refusal(app, "bench", "--model", str(tmp_path), "--base-url", "http://127.0.0.1:9")


def test_benchmarks_are_listed():
    outcome = CliRunner().invoke(benchmarks_app, ["--list"])
    assert outcome.exit_code == 0
    listed = [line.split()[0] for line in outcome.output.splitlines()]
    assert listed == list(BENCHMARKS)
    files = {path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")}
    assert set(listed) == {name for name in files if hasattr(import_module(f"benchmarks.{name}"), "run")}


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_benchmark_can_be_loaded(name):
    module = import_module(f"benchmarks.{name}")
    assert callable(module.run) and callable(module.deliver)


def test_a_short_benchmark_leaves_its_record_and_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no data/labelled there: latency alone
    record, page = tmp_path / "record.json", tmp_path / "page.html"
    arguments = ["backbones", "--short", "--json", str(record), "--report", str(page)]
    outcome = CliRunner().invoke(benchmarks_app, arguments)
    assert outcome.exit_code == 0, outcome.output
    content = json.loads(record.read_text())
    assert {"command", "started", "machine", "versions"} < set(content)
    assert {case["backbone"] for case in content["cases"]} == {"tiny-opt", "MiniLM-L6 (22 M)"}
    assert all(ms > 0 for case in content["cases"] for ms in case["ms"])
    assert content["scores"] == {}
    assert "MiniLM-L6" in page.read_text()


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("backbones", "model"),
        ("backbones", "source"),
        ("refresh", "source"),
        ("losses", "model"),
        ("transfer", "source"),
    ],
)
def test_an_option_that_a_benchmark_does_not_read_is_refused(name, option):
    text = refusal(benchmarks_app, name, "--short", f"--{option}", "x")
    assert text == f"--{option} is nothing that {name} reads; leave it out"


@pytest.mark.parametrize(("given", "source"), [([], "sharegpt"), (["--source", "x"], "x")])
def test_an_option_that_is_not_given_has_its_default(monkeypatch, given, source):
    seen = {}

    def run(source: str, is_short: bool) -> None:
        seen.update(source=source, is_short=is_short)

    fake = SimpleNamespace(run=run, deliver=lambda *_: True)
    monkeypatch.setitem(sys.modules, "benchmarks.fake", fake)
    monkeypatch.setitem(BENCHMARKS, "fake", "what it measures")
    assert CliRunner().invoke(benchmarks_app, ["fake", *given]).exit_code == 0
    assert seen == {"source": source, "is_short": False}


def test_an_unknown_benchmark_is_one_line_and_exit_code_2():
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nope"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (2, f"error: unknown benchmark 'nope'; known are {', '.join(BENCHMARKS)}\n")
