"""Training: which rows, what the checkpoint says of itself, what is learnt, its repeatability."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.params import Params
from pipeline.tracking import load_run_id
from pipeline.train import (
    PATIENCE_EPOCHS,
    Collator,
    Example,
    _parameter_groups,
    _warm_up,
    choose_rows,
    edges_up_to,
    fine_buckets,
    fit,
    split_name,
    train,
    training_rows,
)
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import identity
from serving_plugin.predictor.conversation import FEATURE_NAMES, NUM_FEATURES, Message
from serving_plugin.predictor.encoding import EncodedConversation, InputRule
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import PredictorSpec

# Buckets


@pytest.mark.parametrize(
    ("max_length", "width", "edges"),
    [(399, 200, (0, 200, 400)), (400, 200, (0, 200, 400, 600)), (1, 50, (0, 50)), (100, 50, (0, 50, 100, 150))],
)
def test_the_last_bucket_holds_the_longest_length(max_length: int, width: int, edges: tuple[int, ...]) -> None:
    assert edges_up_to(max_length, width) == edges


def test_lengths_beyond_the_last_edge_fall_in_the_last_bucket() -> None:
    assert fine_buckets([0, 49, 50, 149, 150, 9999], (0, 50, 100, 150)).tolist() == [0, 0, 1, 2, 2, 2]


# Rows


def turns(num_conversations: int, num_turns: int) -> list[LabelledRow]:
    return [
        LabelledRow(f"c{i}:{2 * j + 1}", f"c{i}", "recorded", (Message("user", "q"),), 10 * j, False)
        for i in range(num_conversations)
        for j in range(num_turns)
    ]


def test_a_conversation_gives_no_more_turns_than_its_limit() -> None:
    rows = turns(20, 6)
    chosen = choose_rows(rows, seed=0, max_turns=2)
    by_root = [sum(row.root_id == f"c{i}" for row in chosen) for i in range(20)]
    assert by_root == [2] * 20
    assert chosen == [row for row in rows if row in chosen]  # in file order
    assert len({row.id.split(":")[1] for row in chosen}) == 6  # any turn, not the first ones
    assert choose_rows(rows, seed=1, max_turns=2) != chosen
    assert choose_rows(rows, seed=0) == rows


def test_a_larger_limit_keeps_what_a_smaller_one_chose(make_tiny_params: Any) -> None:
    rows = turns(20, 6)
    few, more = (choose_rows(rows, 0, max_rows=n, max_turns=3) for n in (15, 40))
    assert (len(few), len(more)) == (15, 40)
    assert {row.id for row in few} < {row.id for row in more}
    limited = make_tiny_params(max_train_rows=15, max_turns_per_conversation=3)
    assert training_rows(limited, rows) == few
    assert training_rows(make_tiny_params(max_train_rows=None, max_turns_per_conversation=None), rows) == rows


def test_the_collator_pads_and_keeps_lengths_with_their_censoring() -> None:
    features = tuple(float(i) for i in range(NUM_FEATURES))
    rows = [
        Example(EncodedConversation((5, 6, 7), features, 3, 0), 120, False),
        Example(EncodedConversation((8,), features, 1, 0), 99, True),
    ]
    batch = Collator(pad_token_id=1)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["features"].tolist() == [list(features)] * 2
    assert batch["labels"].tolist() == [[120, 0], [99, 1]]


def test_a_split_is_known_by_the_conversations_held_out(trained: Any) -> None:
    rows = turns(20, 2)
    name = split_name(trained.params, rows)
    assert split_name(trained.params, rows[::-1]) == name
    assert split_name(trained.params, rows[2:]) != name  # a conversation has moved; the settings are the same
    assert name.startswith("seed 0: train ") and "; 20 test conversations " in name
    held_out = read_rows(trained.labelled / "test.jsonl")
    assert PredictorSpec.load(trained.checkpoint).split == split_name(trained.params, held_out)


def test_a_fitted_network_forecasts_in_float32(make_tiny_params: Any, tmp_path: Path) -> None:
    from pipeline.checkpoint import Checkpoint

    params = make_tiny_params(epochs=0.1, dtype="bfloat16")
    fitted = fit(params, chats(20, 1), chats(10, 2), tmp_path)
    fitted.save(tmp_path)
    rows = chats(10, 3)
    reloaded = Checkpoint.load(tmp_path).probabilities(rows)
    np.testing.assert_allclose(fitted.probabilities(rows), reloaded, atol=1e-6)


def test_every_parameter_learns_once_at_its_own_rate(trained: Any) -> None:
    from pipeline.network import load_network

    network = load_network(trained.checkpoint, PredictorSpec.load(trained.checkpoint).num_buckets)
    settings = replace(trained.params.train, learning_rate=1e-5, head_learning_rate=1e-3, weight_decay=0.1)
    found = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in _parameter_groups(network, settings)
        for parameter in group["params"]
    }
    assert len(found) == len(list(network.parameters()))
    for name, parameter in network.named_parameters():
        rate, decay = found[id(parameter)]
        assert rate == (1e-5 if name.startswith("backbone.") else 1e-3), name
        assert decay == (0.0 if name.endswith("bias") or "norm" in name else 0.1), name


# The checkpoint


def test_checkpoint_describes_itself(trained: Any) -> None:
    spec = PredictorSpec.load(trained.checkpoint)
    rows = read_rows(trained.labelled / "train.jsonl")
    assert spec.target_model == "tiny-target"
    assert spec.source == "recorded"
    assert spec.edges_tokens == tuple(range(0, 601, 50))
    assert sum(spec.train_counts) == len(rows)
    assert spec.train_counts[0] == sum(row.output_tokens < 50 for row in rows)
    assert spec.input == InputRule(**trained.params.to_plain()["input"])
    assert spec.feature_names == FEATURE_NAMES
    assert spec.calibration == identity()


def test_checkpoint_is_float32_and_knows_its_padding(trained: Any) -> None:
    config = json.loads((trained.checkpoint / "backbone" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["pad_token_id"] == PredictorSpec.load(trained.checkpoint).pad_token_id


def test_nothing_of_training_is_left_beside_the_checkpoint(trained: Any) -> None:
    assert not [path.name for path in trained.checkpoint.parent.iterdir() if path.name.startswith(".")]
    names = {path.name for path in trained.checkpoint.iterdir()}
    assert names == {"backbone", "head.safetensors", "tokenizer.json", "predictor.json", "run.json"}


def test_run_holds_params_and_metrics_of_every_stage(trained: Any) -> None:
    from mlflow import MlflowClient

    run = MlflowClient(trained.tracking_uri).get_run(load_run_id(trained.checkpoint))
    assert run.data.params["train.backbone"] == "tiny-opt"
    assert run.data.params["input.max_tokens"] == "24"
    assert {"eval_loss", "test.accuracy_200", "export.parity_max_abs_error"} <= set(run.data.metrics)
    assert run.info.status == "FINISHED"


def test_the_epoch_with_the_best_validation_loss_is_kept(trained: Any) -> None:
    import torch
    from mlflow import MlflowClient

    from pipeline.checkpoint import Checkpoint
    from pipeline.losses import LengthLoss
    from pipeline.train import to_examples

    history = MlflowClient(trained.tracking_uri).get_metric_history(load_run_id(trained.checkpoint), "eval_loss")
    losses = [metric.value for metric in history]
    assert len(losses) == min(trained.params.train.epochs, losses.index(min(losses)) + 1 + PATIENCE_EPOCHS)
    loaded = Checkpoint.load(trained.checkpoint)
    examples = to_examples(read_rows(trained.labelled / "validation.jsonl"), loaded.encoder)
    batch = Collator(loaded.spec.pad_token_id)(examples)
    with torch.inference_mode():
        found = LengthLoss(loaded.spec.edges_tokens, 200, 0.0, 0.0)(loaded.network(**batch), batch["labels"])
    assert found.item() == pytest.approx(min(losses), abs=1e-4)


def test_same_seed_same_weights(trained: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    train(trained.params, trained.labelled, tmp_path / "again", f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    for name in ("head.safetensors", "backbone/model.safetensors"):
        first, second = load_file(trained.checkpoint / name), load_file(tmp_path / "again" / name)
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[key], second[key]) for key in first), name


def test_the_warm_up_teaches_the_head_and_leaves_the_backbone(trained: Any) -> None:
    import torch

    from pipeline.checkpoint import Checkpoint
    from pipeline.losses import LengthLoss
    from pipeline.network import new_network
    from pipeline.train import to_examples

    loaded = Checkpoint.load(trained.checkpoint)
    rows = read_rows(trained.labelled / "train.jsonl")
    examples = to_examples(rows, loaded.encoder)
    batch = Collator(loaded.spec.pad_token_id)(examples)
    torch.manual_seed(0)
    network = new_network(str(trained.checkpoint / "backbone"), loaded.spec.num_buckets, use_features=True)
    network.start_from(np.asarray(loaded.spec.train_counts) / len(rows), batch["features"])
    losses = []
    for head_epochs in (0, 10):
        params = replace(trained.params, train=replace(trained.params.train, head_epochs=head_epochs))
        before = {name: value.clone() for name, value in network.state_dict().items()}
        _warm_up(params, network, loaded.spec, examples)
        changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
        trainable = {name for name, _ in network.named_parameters() if not name.startswith("backbone.")}
        assert changed == (trainable if head_epochs else set())
        with torch.inference_mode():
            loss = LengthLoss(loaded.spec.edges_tokens, 200, 0.0, 0.0)
            losses.append(loss(network.eval()(**batch), batch["labels"]).item())
    assert losses[1] < 0.8 * losses[0]


# What is learnt


def chats(num_rows: int, seed: int, *, censored: bool = False) -> list[LabelledRow]:
    """Replies as long as the one before; the text around it is the same, and no window of it shows how long it was."""
    rng = random.Random(seed)
    rows = []
    for i in range(num_rows):
        is_long = rng.random() < 0.5
        before, after = (400, rng.randint(400, 550)) if is_long else (20, rng.randint(0, 150))
        messages = (Message("user", "go on"), Message("assistant", "la " * before), Message("user", "go on"))
        rows.append(LabelledRow(f"s{seed}c{i}:3", f"s{seed}c{i}", "recorded", messages, after, censored and is_long))
    return rows


def fitted_accuracy(params: Params, scratch: Path) -> float:
    from pipeline.network import predict_logits

    fitted = fit(params, chats(120, 1), chats(40, 2), scratch)
    rows = chats(60, 3)
    encoded = [fitted.encoder.encode(row.messages) for row in rows]
    assert len({one.ids for one in encoded}) == 1
    forecast = predict_logits(fitted.network, encoded, fitted.spec.pad_token_id).argmax(axis=1)
    return float(np.mean((forecast >= 6) == [row.output_tokens >= 300 for row in rows]))


def test_lengths_of_earlier_replies_are_learnt_from_the_features_alone(make_tiny_params: Any, tmp_path: Path) -> None:
    accuracy = fitted_accuracy(make_tiny_params(epochs=5.0, head_learning_rate=1e-2), tmp_path)
    assert accuracy > 0.95
    (tmp_path / "blind").mkdir()
    blind = make_tiny_params(epochs=2.0, head_learning_rate=1e-2, use_features=False)
    assert fitted_accuracy(blind, tmp_path / "blind") < 0.7


def test_mixed_sources_are_said_to_be_mixed_and_cut_replies_are_trained_on(
    make_tiny_params: Any, tmp_path: Path
) -> None:
    rows = [*chats(20, 1, censored=True), *(replace(row, source="generated") for row in chats(20, 4))]
    weights = {"label_smoothing_tokens": 50.0, "expected_value_weight": 0.5}
    fitted = fit(make_tiny_params(epochs=1.0, **weights), rows, chats(10, 2, censored=True), tmp_path)
    assert fitted.spec.source == "mixed"
    assert sum(fitted.spec.train_counts) == 40
    assert all(np.isfinite(value.numpy()).all() for value in fitted.network.state_dict().values())
    assert not fitted.network.training


# Settings


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("train", {"backbone": "package:no-such-package"}, "not installed"),
        ("train", {"backbone": "/no/such/folder"}, r"correct train\.backbone"),
        ("input", {"max_tokens": 5000}, r"input\.max_tokens 5000 is over the 2048 positions"),
        ("input", {"max_tokens": 11}, r"input\.max_tokens 11 leaves 0 tokens"),
    ],
)
def test_wrong_settings_are_named_and_nothing_is_written(
    section: str, settings: dict[str, Any], message: str, trained: Any, tmp_path: Path
) -> None:
    params = replace(trained.params, **{section: replace(getattr(trained.params, section), **settings)})
    with pytest.raises(ConfigurationError, match=message) as caught:
        train(params, trained.labelled, tmp_path / "out", f"sqlite:///{tmp_path}/m/mlflow.db")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_smallest_input_that_fits_is_trained_on(trained: Any, make_tiny_params: Any, tmp_path: Path) -> None:
    """One opening and one reply of 4, each behind `</s>`, and a single token of the question."""
    params = make_tiny_params(epochs=0.1)
    params = replace(params, input=replace(params.input, max_tokens=12))
    spec = train(params, trained.labelled, tmp_path / "out", f"sqlite:///{tmp_path}/m/mlflow.db")
    assert PredictorSpec.load(tmp_path / "out") == spec
    assert spec.input.max_tokens == 12
