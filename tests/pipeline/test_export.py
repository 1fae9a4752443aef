"""The export stage: a folder that is a predictor, equal to PyTorch at every shape; 8 bits where they cost nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipeline.export as export_stage
from pipeline.checkpoint import Checkpoint, read_calibrations
from pipeline.export import (
    ParityError,
    check_parity,
    compare_int8,
    export,
    random_inputs,
    with_probabilities,
    write_onnx,
)
from pipeline.params import ExportParams
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.evaluation.scores import Truth
from serving_plugin.predictor.model import LengthPredictor, open_session
from serving_plugin.predictor.rows import read_rows
from serving_plugin.predictor.spec import MODEL_FOLDER_FILES, PredictorSpec


@pytest.fixture(scope="module")
def exact(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder without quantisation."""
    root = tmp_path_factory.mktemp("exact")
    run_export(trained, root, int8=False)
    return root / "export"


def run_export(trained: Any, root: Path, **settings: Any) -> dict[str, Any]:
    """The stage with its outputs in `root`."""
    return export(
        replace(trained.params.export, **settings), trained.checkpoint, trained.calibration, trained.labelled,
        root / "export", root / "export.json", f"sqlite:///{root}/mlruns/mlflow.db", coverage=0.9,
    )  # fmt: skip


def loaded_model(trained: Any) -> Any:
    loaded = Checkpoint.load(trained.checkpoint, trained.calibration)
    return with_probabilities(loaded.network, loaded.spec.calibration.temperature)


def test_folder_holds_a_predictor_and_nothing_else(trained: Any) -> None:
    assert sorted(path.name for path in trained.export.iterdir()) == sorted(MODEL_FOLDER_FILES)
    spec = PredictorSpec.load(trained.export)
    assert spec == PredictorSpec.load(trained.checkpoint).calibrated(read_calibrations(trained.calibration)[0])


def test_metrics_name_parity_latency_and_what_is_served(trained: Any) -> None:
    report = json.loads((trained.metrics / "export.json").read_text())
    assert report == trained.exported
    assert report["parity_max_abs_error"] <= report["parity_tolerance"]
    for latencies in (report["latency_ms"], report["int8"]["latency_ms"]):
        assert set(latencies) == {"length_16", "length_24", "length_64"}
        assert all(0 < latency["p50"] <= latency["p99"] for latency in latencies.values())


# Parity


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("length", [1, 2, 17, 24, 40])
def test_any_shape_equals_pytorch(batch: int, length: int, trained: Any, exact: Path) -> None:
    import torch

    inputs = random_inputs(batch, length, PredictorSpec.load(exact).pad_token_id, vocabulary=100, seed=batch)
    with torch.inference_mode():
        expected = loaded_model(trained)(*(torch.from_numpy(array) for array in inputs.values())).numpy()
    (actual,) = open_session(exact / "model.onnx", num_threads=1).run(None, inputs)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert (actual.argmax(axis=1) == expected.argmax(axis=1)).all()


def test_the_graph_takes_the_temperature_and_the_features(trained: Any, exact: Path) -> None:
    import torch

    spec = PredictorSpec.load(exact)
    inputs = random_inputs(2, 9, spec.pad_token_id, vocabulary=100, seed=0)
    session = open_session(exact / "model.onnx", num_threads=1)
    (actual,) = session.run(None, inputs)
    with torch.inference_mode():
        logits = Checkpoint.load(trained.checkpoint).network(**{k: torch.from_numpy(v) for k, v in inputs.items()})
        for temperature, is_equal in ((spec.calibration.temperature, True), (1.0, False)):
            expected = torch.softmax(logits["logits"] / temperature, dim=-1).numpy()
            assert np.allclose(actual, expected, atol=1e-5) is is_equal
    (other,) = session.run(None, {**inputs, "features": inputs["features"] + 1})
    assert np.abs(other - actual).max() > 1e-3


def test_served_forecasts_are_those_of_the_checkpoint(trained: Any, exact: Path) -> None:
    rows = read_rows(trained.labelled / "test.jsonl")
    expected = Checkpoint.load(trained.checkpoint, trained.calibration).probabilities(rows)
    served = LengthPredictor.load(str(exact)).conversation_probabilities(rows)
    np.testing.assert_allclose(served, expected, atol=1e-4)


def test_a_model_that_differs_is_refused(trained: Any, exact: Path) -> None:
    import torch

    model = loaded_model(trained)
    with torch.no_grad():
        model.network.head[-1].weight.mul_(1.5)
    session = open_session(exact / "model.onnx", num_threads=1)
    with pytest.raises(ParityError, match="batch 1, length 1"):
        check_parity(model, session, PredictorSpec.load(exact), tolerance=1e-4)


def test_a_model_that_differs_in_padded_batches_only_is_refused(trained: Any) -> None:
    """A graph that forgot the mask is right for one prompt and wrong for a batch."""
    import torch

    model = loaded_model(trained)

    class Maskless:
        def run(self, names: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
            tensors["attention_mask"] = torch.ones_like(tensors["attention_mask"])
            with torch.inference_mode():
                return [model(*tensors.values()).numpy()]

    spec: Any = PredictorSpec.load(trained.export)
    with pytest.raises(ParityError, match="batch 2"):
        check_parity(model, Maskless(), spec, tolerance=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("use_features", [True, False])
def test_bert_is_exported_right_too(use_features: bool, trained: Any, tmp_path: Path) -> None:
    """MiniLM's architecture: bidirectional attention, an average over the mask, dropout that must be off."""
    import torch
    from transformers import BertConfig, BertModel

    from pipeline.network import LengthNetwork

    config = BertConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.5, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    network = LengthNetwork(BertModel(config, add_pooling_layer=False), 12, use_features)
    model = with_probabilities(network, 0.7)
    write_onnx(model, tmp_path / "bert.onnx", pad_token_id=0, opset=trained.params.export.opset)
    session = open_session(tmp_path / "bert.onnx", num_threads=1)
    assert check_parity(model, session, PredictorSpec.load(trained.checkpoint), tolerance=1e-5) <= 1e-5
    inputs = random_inputs(2, 9, 0, vocabulary=100, seed=0)
    first, second = (session.run(None, {**inputs, "features": inputs["features"] * k})[0] for k in (1, 9))
    assert np.array_equal(first, second) is not use_features


# 8 bits


def test_8_bits_are_served_where_they_cost_no_accuracy(trained: Any, exact: Path) -> None:
    report = trained.exported
    assert report["served"] == "int8"
    assert report["int8"]["accuracy_loss"] <= trained.params.export.int8_max_loss
    assert (trained.export / "model.onnx").stat().st_size == report["int8"]["onnx_bytes"] < report["onnx_bytes"] / 2
    assert (exact / "model.onnx").stat().st_size == report["onnx_bytes"]
    rows = read_rows(trained.labelled / "validation.jsonl")
    spec = PredictorSpec.load(trained.export)
    starts = np.arange(0, spec.num_buckets, spec.granularity_tokens // spec.edges_tokens[1])
    truth = np.asarray([row.output_tokens for row in rows]) // spec.granularity_tokens
    for folder, key in ((exact, "accuracy_float32"), (trained.export, "accuracy_int8")):
        predictor = LengthPredictor.load(str(folder))
        # calibration moves no mass across the rows' likeliest bucket here: accuracy is that of the graph
        coarse = np.add.reduceat(predictor.conversation_probabilities(rows), starts, axis=1)
        assert np.mean(coarse.argmax(axis=1) == truth) == pytest.approx(report["int8"][key], abs=0.05)
    assert report["int8"]["accuracy_float32"] > 0.9


@pytest.mark.parametrize(("max_loss", "served"), [(0.01, "float32"), (1.0, "int8")])
def test_8_bits_that_cost_accuracy_are_kept_only_where_that_is_allowed(
    max_loss: float, served: str, trained: Any, exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The "quantised" graph always names the last bucket, which the rows' lengths seldom reach."""
    import torch

    loaded = Checkpoint.load(trained.checkpoint)
    with torch.no_grad():
        loaded.network.head[-1].weight.zero_()
        loaded.network.head[-1].bias.copy_(torch.linspace(0, 20, loaded.spec.num_buckets))
    spoilt = tmp_path / "spoilt.onnx"
    write_onnx(with_probabilities(loaded.network, 1.0), spoilt, loaded.spec.pad_token_id, trained.params.export.opset)
    monkeypatch.setattr(export_stage, "quantise", lambda source, target: shutil.copyfile(spoilt, target))
    report = run_export(trained, tmp_path, int8_max_loss=max_loss)
    assert report["served"] == served
    lengths = [row.output_tokens for row in read_rows(trained.labelled / "validation.jsonl")]
    last = np.mean([length >= 400 for length in lengths])
    assert report["int8"]["accuracy_int8"] == pytest.approx(last, abs=1e-4)
    assert report["int8"]["accuracy_loss"] == pytest.approx(report["int8"]["accuracy_float32"] - last, abs=1e-3)
    assert report["int8"]["accuracy_loss"] > 0.3
    kept = exact / "model.onnx" if served == "float32" else spoilt
    inputs = random_inputs(2, 9, loaded.spec.pad_token_id, vocabulary=100, seed=0)
    actual, expected = (
        open_session(path, num_threads=1).run(None, inputs)[0] for path in (tmp_path / "export" / "model.onnx", kept)
    )
    assert np.array_equal(actual, expected)


def test_coverage_of_8_bits_is_judged_below_the_cap(trained: Any) -> None:
    rows = [
        replace(row, output_tokens=min(row.output_tokens, 300), censored=row.output_tokens > 300)
        for row in read_rows(trained.labelled / "validation.jsonl")
    ]
    loaded, truth = Checkpoint.load(trained.checkpoint, trained.calibration), Truth.of(rows)
    session = open_session(trained.export / "model.onnx", num_threads=1)
    found = compare_int8(loaded, session, rows, trained.params.export, 0.9)
    upper = truth.forecasts(loaded.spec.edges_tokens, loaded.probabilities(rows)).quantiles(0.9)
    judged = upper < 300
    assert 0 < judged.sum() < len(rows)
    covered = truth.lengths_tokens <= upper
    assert found["coverage_float32"] == pytest.approx(covered[judged].mean(), abs=1e-4)
    assert covered.mean() > covered[judged].mean()


def test_without_int8_there_is_nothing_of_it(trained: Any, exact: Path) -> None:
    report = json.loads((exact.parent / "export.json").read_text())
    assert report["served"] == "float32"
    assert "int8" not in report
    assert report["parity_max_abs_error"] <= 1e-5


# Whole or not at all


def test_a_refused_export_leaves_the_old_one(trained: Any, tmp_path: Path) -> None:
    run_export(trained, tmp_path, int8=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    with pytest.raises(ParityError, match=r"export\.tolerance 1e-12"):
        run_export(trained, tmp_path, tolerance=1e-12)
    assert {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "export.json", "mlruns"]


def test_without_a_checkpoint_or_calibration_nothing_is_written(trained: Any, tmp_path: Path) -> None:
    settings = ExportParams(18, False, 0.0, 1e-4, 1)
    for checkpoint, calibration, stage in (
        (tmp_path / "none", trained.calibration, "dvc repro"),
        (trained.checkpoint, tmp_path / "none.json", "dvc repro calibrate"),
    ):
        with pytest.raises(ConfigurationError, match=stage):
            export(
                settings, checkpoint, calibration, trained.labelled, tmp_path / "out", tmp_path / "m.json",
                "sqlite:///x.db", coverage=0.9,
            )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
