"""The loaded model: batches, targets, and every way in which a model cannot be found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import resolve_model, resolve_model_in_child
from serving_plugin.predictor.rows import read_rows
from serving_plugin.predictor.target import same_target

CHAMPION = "models:/length-predictor@champion"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("SmolLM2-135M-Instruct", "models/targets/SmolLM2-135M-Instruct/", True),
        ("org/Name", "Name", True),
        ("Name", "Other", False),
        ("org/Name", "Name/org", False),
        ("", "", False),
    ],
)
def test_targets_are_equal_by_their_last_component(a: str, b: str, same: bool) -> None:
    assert same_target(a, b) is same
    assert same_target(b, a) is same


def test_forecast_does_not_depend_on_the_batch(trained: Any) -> None:
    texts = [
        "sum about clocks",
        "essay about " + "rivers and " * 40,
        "",
        "list about planets and kitchens",
        "essay",
    ] * 3
    together = LengthPredictor.load(str(trained.export), batch_size=4).predict(texts)
    alone = LengthPredictor.load(str(trained.export), batch_size=1).predict(texts)
    for a, b in zip(together, alone, strict=True):
        assert a.edges_tokens == b.edges_tokens == tuple(range(0, 601, 50))
        np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-5)


def test_no_prompts_no_forecasts(trained: Any) -> None:
    assert LengthPredictor.load(str(trained.export)).predict([]) == []


def test_it_learnt_what_the_first_word_says(trained: Any) -> None:
    essay, brief = LengthPredictor.load(str(trained.export)).predict(["essay about rivers", "sum about rivers"])
    assert essay.mean_tokens() > brief.mean_tokens() + 200
    assert essay.is_heavy()
    assert not brief.is_heavy()


def test_other_target_is_refused(trained: Any) -> None:
    predictor = LengthPredictor.load(str(trained.export))
    predictor.require_target("/somewhere/tiny-target")
    with pytest.raises(ConfigurationError, match=r"'tiny-target', not 'facebook/opt-13b'.*--allow-other-target"):
        predictor.require_target("facebook/opt-13b")


def test_resolving_in_a_child_gives_the_same(trained: Any) -> None:
    here = resolve_model(CHAMPION, trained.tracking_uri)
    assert here.version == "1"
    assert here.name == "length-predictor"
    assert here.target_model == "tiny-target"
    assert resolve_model_in_child(CHAMPION, trained.tracking_uri) == here
    assert resolve_model("models:/length-predictor/1", trained.tracking_uri).path == here.path


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("models:/length-predictor@nobody", "has no models:/length-predictor@nobody"),
        ("models:/length-predictor/99", "has no models:/length-predictor/99"),
        ("models:/other@champion", "has no models:/other@champion"),
        ("models:/length-predictor", "neither models:/NAME@ALIAS"),
        ("models:/length-predictor/latest", "neither models:/NAME@ALIAS"),
        ("/no/such/folder", "does not exist"),
    ],
)
def test_unknown_model_is_one_line_with_a_cure(uri: str, message: str, trained: Any) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        resolve_model(uri, trained.tracking_uri)
    assert "\n" not in str(caught.value)


def test_child_reports_the_same_line(trained: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has no models:/length-predictor@nobody.*dvc repro"):
        resolve_model_in_child("models:/length-predictor@nobody", trained.tracking_uri)


def test_missing_registry_is_named_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"does not exist.*dvc repro"):
        resolve_model(CHAMPION, f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.onnx").unlink(), "model.onnx missing"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"no graph"), "cannot be loaded"),
        (lambda folder: (folder / "predictor.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "predictor.json").write_text('{"format": 99}'), "has format 99"),
        (lambda folder: (folder / "predictor.json").write_text('{"format": 1}'), "lacks backbone"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "is not a tokenizer"),
    ],
)
def test_spoilt_folder_is_one_line(spoil: Any, message: str, trained: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.export, tmp_path / "folder")
    spoil(folder)
    with pytest.raises(ConfigurationError, match=message) as caught:
        LengthPredictor.load(str(folder))
    assert "\n" not in str(caught.value)


def test_too_few_threads_are_refused(trained: Any) -> None:
    with pytest.raises(ConfigurationError, match="--num-threads 0"):
        LengthPredictor.load(str(trained.export), num_threads=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not a labelled row"),
        ("[1]", ":2: not a labelled row"),
        ('{"id": "a"}', ":2: the row lacks 'root_id'"),
        (
            '{"id":"a","root_id":"a","source":"recorded","prompt":"p","output_tokens":-1,"censored":false}',
            ":2: output_tokens -1",
        ),
    ],
)
def test_bad_row_is_named_by_its_line(line: str, message: str, tmp_path: Path) -> None:
    good = {
        "id": "a",
        "root_id": "a",
        "source": "recorded",
        "prompt": "p\u2028q",
        "output_tokens": 1,
        "censored": False,
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(good, ensure_ascii=False) + "\n" + line + "\n")
    with pytest.raises(ConfigurationError, match=message):
        read_rows(path)


def test_loading_and_serving_imports_no_training_library() -> None:
    code = (
        "import sys; import serving_plugin.predictor.service, serving_plugin.predictor.client; "
        "print([m for m in ('torch', 'transformers', 'mlflow', 'datasets', 'pandas') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert ran.stdout.strip() == "[]"
