"""The whole pipeline by DVC in a copy of the checkout: every stage runs, and a second run does nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.files import SPLITS
from pipeline.params import load_profile, use_profile

ROOT = Path(__file__).parents[2]
STAGES = (
    "target", "prepare", "generate", "label", "train", "calibrate", "export", "baselines", "evaluate", "register",
)  # fmt: skip


def checkout(folder: Path) -> Path:
    """What `git clone` would give of the pipeline, with an empty DVC cache."""
    for name in ("pipeline", "serving_plugin"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".dvc").mkdir()
    for name in ("config", ".gitignore"):
        shutil.copy(ROOT / ".dvc" / name, folder / ".dvc" / name)
    subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True, timeout=60)
    return folder


def dvc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "2", "DVC_NO_ANALYTICS": "1"}
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=540)


@pytest.mark.engine
def test_the_ci_profile_runs_every_stage_once(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    use_profile("ci", path=folder / "params.yaml")
    first = dvc(folder, "repro")
    assert first.returncode == 0, (first.stdout + first.stderr)[-3000:]
    assert all(f"Running stage '{stage}'" in first.stdout for stage in STAGES)
    for split in SPLITS:
        assert (folder / "data/labelled" / f"{split}.jsonl").stat().st_size > 0
    replies = (folder / "data/generated/replies.jsonl").read_text().splitlines()
    generate = load_profile("ci").generate
    assert generate.num_prompts is not None
    assert len(replies) == generate.num_prompts + generate.num_resampled * (generate.samples - 1)
    report = json.loads((folder / "metrics/evaluate.json").read_text())
    assert report["num_rows"] > 0
    assert {"modal", "marginal", "tfidf_linear", "gradient_boosting", "plain_cross_entropy"} <= set(report["baselines"])
    assert report["target_oracle"]["num_replies"] > 0
    assert (folder / "models/predictor/export/model.onnx").is_file()
    assert (folder / "mlruns/mlflow.db").is_file()

    second = dvc(folder, "repro")
    assert second.returncode == 0, second.stderr[-2000:]
    assert "Running stage" not in second.stdout
    assert all(f"Stage '{stage}' didn't change, skipping" in second.stdout for stage in STAGES)

    assert "accuracy_200" in dvc(folder, "metrics", "show").stdout
    plots = dvc(folder, "plots", "show")
    assert plots.returncode == 0, plots.stderr[-2000:]
    assert (folder / "dvc_plots/index.html").is_file()

    # One key changed: only what depends on it runs, and finished shards are not made again.
    use_profile("ci", path=folder / "params.yaml", **{"train.epochs": 2.0})
    third = dvc(folder, "repro")
    assert third.returncode == 0, (third.stdout + third.stderr)[-3000:]
    assert "Stage 'generate' didn't change, skipping" in third.stdout
    assert "Running stage 'train'" in third.stdout


@pytest.mark.engine
def test_the_papers_settings_run_with_tiny_models(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    rows = [
        {
            "id": f"root{i}_0",
            "conversations": [
                {"from": "human", "value": f"{i} things to say about tea"},
                {"from": "gpt", "value": "Tea."},
            ],
        }
        for i in range(80)
    ]
    (folder / "ShareGPT_V3_unfiltered_cleaned_split.json").write_text(json.dumps(rows))  # the path that `paper` names
    params = use_profile("paper", tiny=True, path=folder / "params.yaml")
    assert params.label.source == "generated"
    done = dvc(folder, "repro")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    labelled = [json.loads(line) for line in (folder / "data/labelled/train.jsonl").read_text().splitlines()]
    assert {row["source"] for row in labelled} == {"generated"}
    assert (folder / "models/predictor/export/predictor.json").is_file()


def test_dvc_yaml_names_only_keys_that_exist_and_never_mlruns() -> None:
    plain = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    params = load_profile("cpu").to_plain()
    assert tuple(plain["stages"]) == STAGES
    for name, stage in plain["stages"].items():
        assert stage["cmd"] == f"python -m pipeline.{name}"
        for key in stage["params"]:
            section: Any = params
            for part in key.split("."):
                section = section[part]
        outs = json.dumps([stage.get("outs"), stage.get("metrics")])
        assert "mlruns" not in outs
    assert plain["stages"]["generate"]["outs"] == [{"data/generated": {"persist": True}}]
