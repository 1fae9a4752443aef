"""Training: what the checkpoint says of itself, its loss, its repeatability."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.tracking import load_run_id
from pipeline.train import LengthLoss, edges_up_to, fine_buckets, train
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.rows import read_rows
from serving_plugin.predictor.spec import PredictorSpec


@pytest.mark.parametrize(
    ("max_length", "width", "edges"),
    [(399, 200, (0, 200, 400)), (400, 200, (0, 200, 400, 600)), (1, 50, (0, 50)), (100, 50, (0, 50, 100, 150))],
)
def test_the_last_bucket_holds_the_longest_length(max_length: int, width: int, edges: tuple[int, ...]) -> None:
    assert edges_up_to(max_length, width) == edges


def test_lengths_beyond_the_last_edge_fall_in_the_last_bucket() -> None:
    assert fine_buckets([0, 49, 50, 149, 150, 9999], (0, 50, 100, 150)).tolist() == [0, 0, 1, 2, 2, 2]


def test_checkpoint_describes_itself(trained: Any) -> None:
    spec = PredictorSpec.load(trained.checkpoint)
    rows = read_rows(trained.labelled / "train.jsonl")
    assert spec.target_model == "tiny-target"
    assert spec.source == "recorded"
    assert spec.edges_tokens == tuple(range(0, 601, 50))
    assert sum(spec.train_counts) == len(rows)
    assert spec.train_counts[0] == sum(row.output_tokens < 50 for row in rows)
    assert spec.max_input_tokens == 24 == spec.head_tokens + spec.tail_tokens + 1  # </s> in front


def test_checkpoint_is_float32_and_knows_its_padding(trained: Any) -> None:
    config = json.loads((trained.checkpoint / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["pad_token_id"] == PredictorSpec.load(trained.checkpoint).pad_token_id


def test_nothing_of_training_is_left_beside_the_checkpoint(trained: Any) -> None:
    assert not [path.name for path in trained.checkpoint.parent.iterdir() if path.name.startswith(".")]


def test_run_holds_params_and_metrics_of_every_stage(trained: Any) -> None:
    from mlflow import MlflowClient

    run = MlflowClient(trained.tracking_uri).get_run(load_run_id(trained.checkpoint))
    assert run.data.params["train.backbone"] == "tiny-opt"
    assert {"eval_loss", "test.accuracy_200", "export.parity_max_abs_error"} <= set(run.data.metrics)
    assert run.info.status == "FINISHED"


def test_same_seed_same_weights(trained: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    train(trained.params, trained.labelled, tmp_path / "again", f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    first = load_file(trained.checkpoint / "model.safetensors")
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_plain_loss_is_cross_entropy_of_the_bucket() -> None:
    import torch

    loss = LengthLoss((0, 100, 200), 100, smoothing_tokens=0, expected_value_weight=0)
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1]))
    assert loss({"logits": logits}, torch.tensor([99, 5000])).item() == pytest.approx(expected.item())


def test_expected_length_joins_the_loss_in_units_of_the_granularity() -> None:
    import torch

    logits = torch.zeros((1, 2))  # expected length (49.5 + 149.5) / 2 = 99.5
    plain = LengthLoss((0, 100, 200), 100, 0, 0)({"logits": logits}, torch.tensor([49]))
    both = LengthLoss((0, 100, 200), 100, 0, 2.0)({"logits": logits}, torch.tensor([49]))
    assert (both - plain).item() == pytest.approx(2.0 * 50.5 / 100)


def test_smoothing_prefers_a_near_bucket_to_a_far_one() -> None:
    import torch

    loss = LengthLoss((0, 100, 200, 300), 100, smoothing_tokens=100, expected_value_weight=0)
    near, far = torch.tensor([[0.0, 5.0, 0.0]]), torch.tensor([[0.0, 0.0, 5.0]])
    label = torch.tensor([40])
    assert loss({"logits": near}, label) < loss({"logits": far}, label)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "package:no-such-package"}, "not installed"),
        ({"backbone": "/no/such/folder"}, "correct train.backbone"),
        ({"max_input_tokens": 5000}, "over the 2048"),
        ({"max_input_tokens": 8, "head_tokens": 7}, None),
    ],
)
def test_wrong_settings_are_named(
    settings: dict[str, Any], message: str | None, trained: Any, tmp_path: Path, make_tiny_params: Any
) -> None:
    if message is None:  # room for the head and one special token: just enough
        settings = {**settings, "epochs": 0.1}
        spec = train(
            make_tiny_params(**settings), trained.labelled, tmp_path / "out", f"sqlite:///{tmp_path}/m/mlflow.db"
        )
        assert (spec.head_tokens, spec.tail_tokens) == (7, 0)
        return
    with pytest.raises(ConfigurationError, match=message) as caught:
        train(make_tiny_params(**settings), trained.labelled, tmp_path / "out", f"sqlite:///{tmp_path}/m/mlflow.db")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
