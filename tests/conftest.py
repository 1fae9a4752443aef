"""Fixtures shared by the tests of the pipeline, the predictor and the command line."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.params import Params, load_profile

LABELLED_ROWS = {"train": 160, "validation": 40, "calibration": 20, "test": 60}


@dataclass(frozen=True)
class TrainedPredictor:
    """A tiny predictor that went once through train, evaluate, export and register, and where each left its files."""

    params: Params
    labelled: Path
    checkpoint: Path
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
        "epochs": 8.0, "batch_size": 16, "learning_rate": 1e-3, "max_input_tokens": 24, "head_tokens": 12,
        "label_smoothing_tokens": 0.0, "expected_value_weight": 0.0,
    }  # fmt: skip
    return replace(
        params,
        target=replace(params.target, name="tiny-target"),
        label=replace(params.label, max_length_tokens=599),
        train=replace(params.train, **{**learning, **train}),
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
            row = {
                "id": f"{split}{i}_0", "root_id": f"{split}{i // 2}", "source": "recorded",
                "prompt": f"{kind} about {rng.choice(things)} and {rng.choice(things)}",
                "num_prompt_tokens": 6, "output_tokens": length, "censored": False, "bucket": length // 200,
            }  # fmt: skip
            lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedPredictor:
    """The four stages, run once for all tests."""
    from pipeline.evaluate import evaluate
    from pipeline.export import export
    from pipeline.register import register
    from pipeline.tracking import load_run_id
    from pipeline.train import train

    root = tmp_path_factory.mktemp("trained")
    params, labelled, checkpoint, folder = tiny_params(), root / "labelled", root / "checkpoint", root / "export"
    metrics, plots, mlruns = root / "metrics", root / "plots", root / "mlruns"
    store = f"sqlite:///{mlruns / 'mlflow.db'}"
    write_labelled_rows(labelled)
    train(params, labelled, checkpoint, store)
    evaluation = evaluate(params, labelled, checkpoint, metrics / "evaluate.json", plots, store)
    exported = export(params.export, checkpoint, folder, metrics / "export.json", store)
    run_id = load_run_id(checkpoint)
    registered = register(params.register, folder, metrics / "evaluate.json", run_id, metrics / "register.json", store)
    return TrainedPredictor(
        params, labelled, checkpoint, folder, metrics, plots, mlruns, evaluation, exported, registered
    )


@pytest.fixture
def make_tiny_params() -> Any:
    """`tiny_params`, for tests that want other settings."""
    return tiny_params
