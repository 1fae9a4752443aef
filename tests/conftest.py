"""Fixtures shared by the tests of the pipeline, the predictor and the command line."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.params import Params, load_profile

# Before torch loads, as in `run_stage`: threads that spin at barriers cost a multiple where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

LABELLED_ROWS = {"train": 160, "validation": 40, "calibration": 40, "test": 60}


@dataclass(frozen=True)
class TrainedPredictor:
    """A tiny predictor that went once through every stage from train to register, and where each left its files."""

    params: Params
    labelled: Path
    checkpoint: Path
    calibration: Path
    baselines: Path
    predictions: Path
    export: Path
    metrics: Path
    plots: Path
    mlruns: Path
    evaluation: dict[str, Any]
    exported: dict[str, Any]
    registered: dict[str, Any]

    @property
    def tracking_uri(self) -> str:
        """The sqlite store that training opened."""
        return f"sqlite:///{self.mlruns / 'mlflow.db'}"


def tiny_params(**train: Any) -> Params:
    """Profile `ci` made to learn the rows of `write_labelled_rows`; `train` overrides train.*."""
    params = load_profile("ci")
    learning = {
        "epochs": 8.0, "batch_size": 16, "learning_rate": 1e-3, "head_dropout": 0.1, "label_smoothing_tokens": 0.0,
        "expected_value_weight": 0.0, "max_turns_per_conversation": None,
    }  # fmt: skip
    return replace(
        params,
        target=replace(params.target, name="tiny-target"),
        label=replace(params.label, max_length_tokens=599),
        input=replace(params.input, max_tokens=24, opening_tokens=4, reply_tokens=4),
        train=replace(params.train, **{**learning, **train}),
        baselines=replace(params.baselines, plain_cross_entropy=False),
        evaluate=replace(params.evaluate, num_bootstrap=50),
        export=replace(params.export, tolerance=1e-4, num_latency_runs=5),
        register=replace(params.register, allow_worse=False),
    )


def write_labelled_rows(folder: Path, seed: int = 0) -> None:
    """Prompts whose first word tells the length of the reply: essays are long, lists middling, sums short."""
    rng = random.Random(seed)
    kinds = (("essay", 450, 550), ("list", 210, 290), ("sum", 5, 60))
    things = ("rivers", "bridges", "clocks", "kitchens", "planets", "letters", "ladders", "gardens")
    folder.mkdir(parents=True, exist_ok=True)
    for split, num_rows in LABELLED_ROWS.items():
        lines = []
        for i in range(num_rows):
            kind, low, high = rng.choice(kinds)
            length = rng.randint(low, high)
            prompt = f"{kind} about {rng.choice(things)} and {rng.choice(things)}"
            row = {
                "root_id": f"{split}{i}", "source": "recorded", "messages": [{"role": "user", "content": prompt}],
                "replies": [{"turn": 1, "output_tokens": length, "censored": False}],
            }  # fmt: skip
            lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedPredictor:
    """The stages in their order, run once for all tests."""
    from pipeline.baselines import run as fit_baselines
    from pipeline.calibrate import calibrate
    from pipeline.evaluate import Outputs, evaluate
    from pipeline.export import export
    from pipeline.register import Championship, register
    from pipeline.tracking import load_run_id
    from pipeline.train import train

    root = tmp_path_factory.mktemp("trained")
    params, labelled, checkpoint, folder = tiny_params(), root / "labelled", root / "checkpoint", root / "export"
    calibration, baselines, predictions = root / "calibration.json", root / "baselines.npz", root / "predictions.npz"
    metrics, plots, mlruns = root / "metrics", root / "plots", root / "mlruns"
    store = f"sqlite:///{mlruns / 'mlflow.db'}"
    write_labelled_rows(labelled)
    train(params, labelled, checkpoint, store)
    calibrate(params.calibrate, labelled, checkpoint, calibration)
    exported = export(
        params.export, checkpoint, calibration, labelled, folder, metrics / "export.json", store, coverage=0.9
    )
    fit_baselines(params, labelled, baselines)
    outputs, run_id = Outputs(metrics / "evaluate.json", plots, predictions), load_run_id(checkpoint)
    evaluation = evaluate(params, labelled, folder, baselines, outputs, run_id, store)
    registered = register(
        params.register, folder, outputs.metrics, run_id, metrics / "register.json", store,
        Championship(predictions, labelled / "test.jsonl"),
    )  # fmt: skip
    return TrainedPredictor(
        params, labelled, checkpoint, calibration, baselines, predictions, folder, metrics, plots, mlruns, evaluation,
        exported, registered,
    )  # fmt: skip


@pytest.fixture
def make_tiny_params() -> Any:
    """`tiny_params`, for tests that want other settings."""
    return tiny_params
