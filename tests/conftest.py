"""Fixtures shared by the tests of the pipeline, the predictor and the command line."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.params import Params, parse_params

LABELLED_ROWS = {"train": 160, "validation": 40, "calibration": 20, "test": 60}


@dataclass(frozen=True)
class TrainedPredictor:
    """A tiny predictor that went through train, evaluate, export and register once, and where each stage left its files."""

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
    """Settings for a random tiny OPT on the rows of `write_labelled_rows`; `train` overrides train.*."""
    shares = {"train": 0.7, "validation": 0.1, "calibration": 0.1, "test": 0.1}
    learning = {
        "backbone": "tiny-opt", "epochs": 8.0, "batch_size": 16, "learning_rate": 1e-3, "weight_decay": 0.0,
        "warmup_share": 0.1, "max_input_tokens": 24, "head_tokens": 12, "fine_granularity_tokens": 50,
        "label_smoothing_tokens": 0.0, "expected_value_weight": 0.0, "max_train_rows": None,
    }  # fmt: skip
    generate = {
        "num_prompts": 0, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 64,
        "max_model_len": 512, "max_num_seqs": 4, "shard_size": 8, "tensor_parallel_size": 1, "kv_cache_gib": 1,
        "gpu_memory_utilization": 0.5,
    }  # fmt: skip
    prepare = {
        "source": "package", "max_prompts": None, "min_prompt_chars": 1, "max_prompt_chars": 1000,
        "near_duplicate_chars": 64, "shares": shares,
    }  # fmt: skip
    plain = {
        "profile": "ci",
        "seed": 0,
        "target": {"name": "tiny-target", "path": None, "dtype": "float32"},
        "prepare": prepare,
        "generate": generate,
        "label": {"source": "recorded", "granularity_tokens": 200, "max_length_tokens": 599},
        "train": {**learning, **train},
        "evaluate": {"granularities_tokens": [100, 200, 400], "heavy_over_tokens": 128, "num_bootstrap": 50},
        "export": {"opset": 17, "tolerance": 1e-4, "num_latency_runs": 5},
        "register": {"name": "length-predictor", "alias": "champion", "allow_worse": False},
    }
    return parse_params(plain, "tests")


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
