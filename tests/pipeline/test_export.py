"""The export stage: a folder that is a predictor, equal to PyTorch at every shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.backbone import load_classifier
from pipeline.export import ParityError, check_parity, export, random_inputs, with_probabilities
from pipeline.params import ExportParams
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.model import open_session
from serving_plugin.predictor.spec import MODEL_FOLDER_FILES, PredictorSpec


def test_folder_holds_a_predictor_and_nothing_else(trained: Any) -> None:
    assert sorted(path.name for path in trained.export.iterdir()) == sorted(MODEL_FOLDER_FILES)
    assert PredictorSpec.load(trained.export) == PredictorSpec.load(trained.checkpoint)


def test_metrics_name_parity_and_latency(trained: Any) -> None:
    report = json.loads((trained.metrics / "export.json").read_text())
    assert report == trained.exported
    assert report["parity_max_abs_error"] <= report["parity_tolerance"]
    assert set(report["latency_ms"]) == {"length_16", "length_24", "length_64"}
    assert all(0 < latency["p50"] <= latency["p99"] for latency in report["latency_ms"].values())


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("length", [1, 2, 17, 24, 40])
def test_any_shape_equals_pytorch(batch: int, length: int, trained: Any) -> None:
    import torch

    spec = PredictorSpec.load(trained.checkpoint)
    model = with_probabilities(load_classifier(str(trained.checkpoint)))
    inputs = random_inputs(batch, length, spec.pad_token_id, vocabulary=100, seed=batch)
    with torch.inference_mode():
        expected = model(*(torch.from_numpy(array) for array in inputs)).numpy()
    session = open_session(trained.export / "model.onnx", num_threads=1)
    (actual,) = session.run(None, {"input_ids": inputs[0], "attention_mask": inputs[1]})
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_model_that_differs_is_refused(trained: Any) -> None:
    import torch

    spec = PredictorSpec.load(trained.checkpoint)
    model = with_probabilities(load_classifier(str(trained.checkpoint)))
    with torch.no_grad():
        model.classifier.score.weight.mul_(1.5)
    session = open_session(trained.export / "model.onnx", num_threads=1)
    with pytest.raises(ParityError, match="batch 1, length 1"):
        check_parity(model, session, spec, tolerance=1e-4)


def test_bert_is_exported_right_too(trained: Any, tmp_path: Path) -> None:
    """MiniLM's architecture: bidirectional attention, a pooled first token, dropout that must be off."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from pipeline.export import write_onnx

    config = BertConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, num_labels=12, hidden_dropout_prob=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = with_probabilities(BertForSequenceClassification(config).eval())
    write_onnx(model, tmp_path / "bert.onnx", pad_token_id=0, opset=17)
    spec = PredictorSpec.load(trained.checkpoint)
    session = open_session(tmp_path / "bert.onnx", num_threads=1)
    assert check_parity(model, session, spec, tolerance=1e-5) <= 1e-5


def test_without_a_checkpoint_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dvc repro"):
        export(ExportParams(17, 1e-4, 1), tmp_path / "none", tmp_path / "out", tmp_path / "m.json", "sqlite:///x.db")
    assert list(tmp_path.iterdir()) == []
