"""The register stage: ONNX flavour with its companions, an alias, once per content, and the gate."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.register import content_sha256, register
from pipeline.tracking import load_run_id
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import resolve_model
from serving_plugin.predictor.spec import PredictorSpec

CHAMPION = "models:/length-predictor@champion"


def _register_again(trained: Any, folder: Path, tmp_path: Path, store: str) -> dict[str, Any]:
    evaluation = trained.metrics / "evaluate.json"
    run_id = load_run_id(trained.checkpoint)
    return register(trained.params.register, folder, evaluation, run_id, tmp_path / "register.json", store)


def test_registered_once_per_content(trained: Any, tmp_path: Path) -> None:
    """In a copy of the store, which also stands for a moved checkout: MLflow recorded absolute paths."""
    shutil.copytree(trained.mlruns, tmp_path / "mlruns")
    store = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    again = _register_again(trained, trained.export, tmp_path, store)
    assert again == trained.registered
    assert again["version"] == 1

    other = shutil.copytree(trained.export, tmp_path / "other")
    replace(PredictorSpec.load(other), granularity_tokens=200, source="mixed").save(other)
    assert _register_again(trained, other, tmp_path, store)["version"] == 2
    assert resolve_model(CHAMPION, store).version == "2"
    back = _register_again(trained, trained.export, tmp_path, store)
    assert back["version"] == 1
    assert resolve_model(CHAMPION, store).version == "1"


def test_version_carries_its_origin(trained: Any) -> None:
    from mlflow import MlflowClient

    version = MlflowClient(trained.tracking_uri).get_model_version_by_alias("length-predictor", "champion")
    assert version.run_id == load_run_id(trained.checkpoint)
    assert version.tags["target_model"] == "tiny-target"
    assert version.tags["content_sha256"] == content_sha256(trained.export)


def test_artifacts_are_an_onnx_flavour_with_signature_and_companions(trained: Any) -> None:
    import mlflow
    from mlflow.models import Model

    folder = Path(resolve_model(CHAMPION, trained.tracking_uri).path)
    model = Model.load(folder)
    assert "onnx" in model.flavors
    assert [column.name for column in model.signature.inputs.inputs] == ["input_ids", "attention_mask"]
    assert model.metadata["target_model"] == "tiny-target"
    assert {"MLmodel", "model.onnx", "tokenizer.json", "predictor.json"} <= {path.name for path in folder.iterdir()}
    assert len(mlflow.onnx.load_model(str(folder)).graph.output) == 1


def test_registered_model_forecasts_as_the_exported_one(trained: Any) -> None:
    texts = ["essay about rivers", "sum about clocks and letters", "list about nothing at all"]
    folder = LengthPredictor.load(str(trained.export)).predict(texts)
    registered = LengthPredictor.load(CHAMPION, tracking_uri=trained.tracking_uri).predict(texts)
    np.testing.assert_allclose(
        [forecast.probabilities for forecast in registered], [forecast.probabilities for forecast in folder], atol=1e-6
    )


def test_moved_store_still_finds_its_artifacts(trained: Any, tmp_path: Path) -> None:
    moved = shutil.copytree(trained.mlruns, tmp_path / "elsewhere" / "mlruns")
    database = moved / "mlflow.db"
    content = database.read_bytes()
    gone = str(trained.mlruns.parent)
    database.write_bytes(content.replace(gone.encode(), ("/" + "x" * (len(gone) - 1)).encode()))
    path = Path(resolve_model(CHAMPION, f"sqlite:///{database}").path)
    assert path.is_relative_to(moved)


def test_worse_than_the_modal_bucket_is_refused_unless_told(trained: Any, tmp_path: Path) -> None:
    evaluation = tmp_path / "evaluate.json"
    evaluation.write_text(json.dumps({"accuracy_200": 0.3, "modal_accuracy_200": 0.4}))
    store = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    run_id, metrics = load_run_id(trained.checkpoint), tmp_path / "register.json"
    with pytest.raises(ConfigurationError, match=r"0\.300 at 200 tokens is worse"):
        register(trained.params.register, trained.export, evaluation, run_id, metrics, store)
    assert not metrics.exists()
    assert not (tmp_path / "mlruns").exists()

    willing = replace(trained.params.register, allow_worse=True)
    assert register(willing, trained.export, evaluation, run_id, metrics, store)["version"] == 1
    assert json.loads(metrics.read_text())["version"] == 1


def test_without_an_evaluation_the_cure_is_named(trained: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dvc repro evaluate"):
        register(trained.params.register, trained.export, tmp_path / "none.json", "x", tmp_path / "m", "sqlite:///x.db")
