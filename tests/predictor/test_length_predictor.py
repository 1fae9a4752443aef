"""The loaded model: batches, targets, and every way in which a model cannot be found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import NUM_KNOTS, Recalibration
from serving_plugin.predictor.conversation import Message
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import resolve_model, resolve_model_in_child
from serving_plugin.predictor.spec import PredictorSpec
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


CONVERSATIONS = [
    (Message("user", "sum about clocks"),),
    (Message("user", "essay about " + "rivers and " * 40),),
    (Message("user", ""),),
    (Message("user", "essay"), Message("assistant", "once upon a time " * 20), Message("user", "list about planets")),
    (Message("system", "be brief"), Message("user", "list about planets and kitchens")),
    (),
] * 3


@pytest.fixture(scope="module")
def float_export(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model folder without quantisation."""
    from pipeline.export import export

    root = tmp_path_factory.mktemp("float")
    settings = replace(trained.params.export, int8=False)
    export(
        settings, trained.checkpoint, trained.calibration, trained.labelled, root / "export", root / "export.json",
        f"sqlite:///{root}/mlruns/mlflow.db", coverage=0.9,
    )  # fmt: skip
    return str(root / "export")


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_forecast_does_not_depend_on_the_batch(kind: str, float_export: str, trained: Any) -> None:
    assert trained.exported["served"] == "int8"
    champion = resolve_model(CHAMPION, trained.tracking_uri).path  # what the registry made of it
    folder = float_export if kind == "float32" else champion
    together = LengthPredictor.load(folder, batch_size=4).predict(CONVERSATIONS)
    alone = LengthPredictor.load(folder, batch_size=1).predict(CONVERSATIONS)
    for a, b in zip(together, alone, strict=True):
        assert a.edges_tokens == b.edges_tokens == tuple(range(0, 601, 50))
        np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-5)


def test_forecasts_come_in_the_order_of_the_conversations(float_export: str) -> None:
    predictor = LengthPredictor.load(float_export, batch_size=4)
    together = predictor.probabilities([predictor.encode(one) for one in CONVERSATIONS[:6]])
    for conversation, row in zip(CONVERSATIONS[:6], together, strict=True):
        np.testing.assert_allclose(predictor.probabilities([predictor.encode(conversation)])[0], row, atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 0.1


def test_a_prompt_is_a_first_message(float_export: str) -> None:
    predictor = LengthPredictor.load(float_export)
    text = "essay about rivers"
    assert predictor.predict_texts([text]) == predictor.predict([(Message("user", text),)])


def test_no_prompts_no_forecasts(trained: Any) -> None:
    predictor = LengthPredictor.load(str(trained.export))
    assert predictor.predict([]) == predictor.predict_texts([]) == []


def test_it_learnt_what_the_first_word_says(trained: Any) -> None:
    texts = ["essay about rivers", "sum about rivers"]
    essay, brief = LengthPredictor.load(str(trained.export)).predict_texts(texts)
    assert essay.mean_tokens() > brief.mean_tokens() + 200
    assert essay.is_heavy()
    assert not brief.is_heavy()


def test_earlier_messages_count(float_export: str) -> None:
    question = Message("user", "list about planets")
    predictor = LengthPredictor.load(float_export)
    first, later = predictor.predict([(question,), (Message("user", "essay"), Message("assistant", "x"), question)])
    assert np.abs(np.asarray(first.probabilities) - later.probabilities).max() > 1e-3


def test_each_conversation_is_calibrated_as_its_group(float_export: str, tmp_path: Path) -> None:
    """Knots near 0 say that replies were shorter than forecast, near 1 that they were longer."""
    folder, plain_folder = (shutil.copytree(float_export, tmp_path / name) for name in ("grouped", "plain"))
    levels = np.linspace(0, 1, NUM_KNOTS + 1)
    same, shorter, longer = (tuple(row.tolist()) for row in (levels, levels**50, 1 - (1 - levels) ** 50))
    spec = PredictorSpec.load(folder)
    knots = (same, longer, shorter, same)  # first turns, short and long; later turns
    spec.calibrated(Recalibration(spec.calibration.temperature, (4,), knots)).save(folder)
    spec.calibrated(Recalibration(spec.calibration.temperature, (), (same, same))).save(plain_folder)
    short, long = Message("user", "essay"), Message("user", "sum about rivers and gardens")
    before = (Message("user", "b"), Message("assistant", "c"))
    conversations = [(short,), (long,), (*before, short), (*before, long)]
    calibrated, raw = LengthPredictor.load(str(folder)), LengthPredictor.load(str(plain_folder))
    assert [raw.encode(one).num_tokens >= 4 for one in conversations] == [False, True, False, True]
    found, base = (p.probabilities([p.encode(one) for one in conversations]) for p in (calibrated, raw))
    expected = calibrated.spec.calibration.apply(base, np.arange(4))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert [np.abs(a - b).max() > 0.02 for a, b in zip(found, base, strict=True)] == [False, True, True, False]
    assert found[1, 0] < base[1, 0] and found[2, 0] > base[2, 0]


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


def change_spec(folder: Path, **changes: Any) -> None:
    path = folder / "predictor.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.onnx").unlink(), "model.onnx missing"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"no graph"), "cannot be loaded"),
        (lambda folder: (folder / "predictor.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "predictor.json").write_text('{"format": 99}'), "has format 99"),
        (lambda folder: (folder / "predictor.json").write_text('{"format": 1}'), "has format 1, this version reads 2"),
        (lambda folder: (folder / "predictor.json").write_text('{"format": 2}'), "lacks backbone, calibration"),
        (lambda folder: change_spec(folder, feature_names=["moon_phase"]), "other conversation features"),
        (lambda folder: change_spec(folder, input={"max_tokens": 24}), "cannot be used"),
        (lambda folder: change_spec(folder, calibration={"temperature": 1.0}), "cannot be used"),
        (lambda folder: (folder / "predictor.json").write_text("[]"), "holds no JSON object"),
        (lambda folder: (folder / "predictor.json").write_bytes(b"\x80"), "is not JSON"),
        (lambda folder: change_spec(folder, edges_tokens=[0, 100, 50]), "that rise from 0"),
        (lambda folder: change_spec(folder, edges_tokens=[0, 50]), "are no rows of 1 buckets"),
        (
            lambda folder: change_spec(folder, edges_tokens=[0, 50], train_counts=[5]),
            "has 12 buckets, .* 1: not of one",
        ),
        (lambda folder: change_spec(folder, granularity_tokens="x"), "granularity_tokens is 'x'"),
        (lambda folder: change_spec(folder, pad_token_id=None), "pad_token_id is None"),
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


def test_loading_and_serving_imports_no_training_library() -> None:
    code = (
        "import sys; import serving_plugin.predictor.service, serving_plugin.predictor.client; "
        "print([m for m in ('torch', 'transformers', 'mlflow', 'datasets', 'pandas') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert ran.stdout.strip() == "[]"
