"""The register stage: ONNX flavour with its companions, once per content, and champion or challenger."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.params import RegisterParams
from pipeline.register import Championship, content_sha256, register, score_champion
from pipeline.tracking import load_run_id
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor import lifecycle
from serving_plugin.predictor.calibration import identity
from serving_plugin.predictor.conversation import FEATURE_NAMES, Message
from serving_plugin.predictor.evaluation.scores import Forecasts, Truth, row_scores
from serving_plugin.predictor.gate import RowScores
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import resolve_model
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import FORMAT

NAME = "length-predictor"
CHAMPION = f"models:/{NAME}@champion"
EDGES = (0, 100, 200, 300, 400)
SETTINGS = RegisterParams(NAME, "champion", allow_worse=False)
NUM_CONVERSATIONS = 60


def write_folder(folder: Path, *, source: str = "recorded", target: str = "tiny-target") -> Path:
    """A predictor folder whose graph gives every prompt the same forecast; `source` makes its content another."""
    import onnx
    from onnx import TensorProto, helper

    ids, mask = (
        helper.make_tensor_value_info(name, TensorProto.INT64, ("batch", "length"))
        for name in ("input_ids", "attention_mask")
    )
    output = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ("batch", len(EDGES) - 1))
    weights = helper.make_tensor("weights", TensorProto.FLOAT, (1, len(EDGES) - 1), [0.0, 1.0, 0.0, 0.0])
    axes = helper.make_tensor("axes", TensorProto.INT64, (1,), [1])
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["float_mask"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["float_mask", "axes"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    graph = helper.make_graph(nodes, "tiny", [ids, mask], [output], [weights, axes])
    folder.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    (folder / "tokenizer.json").write_text("{}")
    spec = {
        "format": FORMAT, "edges_tokens": EDGES, "granularity_tokens": 200, "target_model": target, "backbone": "tiny",
        "input": {"max_tokens": 16, "opening_tokens": 0, "reply_tokens": 0, "head_share": 0.5},
        "feature_names": FEATURE_NAMES, "pad_token_id": 0, "source": source, "train_counts": [1, 1, 1, 1],
        "calibration": identity().to_json(),
    }  # fmt: skip
    (folder / "predictor.json").write_text(json.dumps(spec))
    return folder


@dataclass
class Workplace:
    """A registry and the files that earlier stages leave, on conversations whose second reply is the longer one.

    `skill` is the share of conversations that a predictor gets right.
    """

    root: Path
    champion_skill: float = 0.6
    champion_target: str = "tiny-target"
    champion_split: str = ""
    champion_error: str = ""

    @property
    def store(self) -> str:
        return f"sqlite:///{self.root}/mlruns/mlflow.db"

    @property
    def rows(self) -> Path:
        return self.root / "test.jsonl"

    def write_rows(self) -> None:
        messages = [{"role": role, "content": "words"} for role in ("user", "assistant", "user", "assistant")]
        lengths = {1: 50, 3: 250}
        lines = []
        for i in range(NUM_CONVERSATIONS):
            replies = [{"turn": turn, "output_tokens": n, "censored": False} for turn, n in lengths.items()]
            replies.append(dict(replies[0], output_tokens=60))  # a second sample of the first reply
            line = {"root_id": f"c{i}", "source": "recorded", "messages": messages, "replies": replies}
            lines.append(json.dumps(line) + "\n")
        self.rows.write_text("".join(lines))

    def probabilities(self, rows: Sequence[LabelledRow], skill: float) -> np.ndarray:
        """(rows, buckets): certain of the right bucket in the first conversations, of a wrong one in the others."""
        right = [int(row.root_id[1:]) < skill * NUM_CONVERSATIONS for row in rows]
        long = [(row.num_earlier_replies == 1) == hit for row, hit in zip(rows, right, strict=True)]
        return np.eye(4)[np.where(long, 2, 0)]

    def write_candidate(self, skill: float, gain_over_modal: tuple[float, float, float] = (0.2, 0.1, 0.3)) -> None:
        """The evaluate stage's files."""
        rows = read_rows(self.rows)
        lengths = np.asarray([row.output_tokens for row in rows])
        forecasts = Forecasts.from_weights(EDGES, self.probabilities(rows, skill))
        row_by_row = row_scores(forecasts, lengths, (200,), 0.9)
        np.savez(
            self.root / "test_predictions.npz",
            ids=np.asarray([row.id for row in rows]),
            roots=np.asarray([row.root_id for row in rows]),
            lengths_tokens=lengths,
            mean_tokens=forecasts.means(),
            hit_200=row_by_row["accuracy_200"],
            crps_tokens=row_by_row["crps_tokens"],
        )
        gain = dict(zip(("value", "low", "high"), gain_over_modal, strict=True))
        baseline = {"accuracy_200": skill - gain["value"], "gain": {"accuracy_200": gain}}
        report = {"accuracy_200": skill, "baselines": {"modal": baseline, "marginal": baseline}}
        (self.root / "evaluate.json").write_text(json.dumps(report))

    def load(self, uri: str, tracking_uri: str) -> Any:
        """The champion, as the pipeline would load it."""
        assert tracking_uri == self.store
        assert uri.startswith(f"models:/{NAME}/")
        if self.champion_error:
            raise ConfigurationError(self.champion_error)

        def conversation_probabilities(rows: Sequence[LabelledRow]) -> np.ndarray:
            assert len({row.id for row in rows}) == len(rows)  # no prompt is forecast twice
            return self.probabilities(rows, self.champion_skill)

        spec = SimpleNamespace(edges_tokens=EDGES, target_model=self.champion_target, split=self.champion_split)
        return SimpleNamespace(spec=spec, conversation_probabilities=conversation_probabilities)

    def register(self, folder: Path, settings: RegisterParams = SETTINGS) -> dict[str, Any]:
        championship = Championship(self.root / "test_predictions.npz", self.rows, self.load)
        metrics = self.root / "register.json"
        found = register(settings, folder, self.root / "evaluate.json", "no run", metrics, self.store, championship)
        assert json.loads(metrics.read_text()) == found
        return found

    def champion(self) -> int | None:
        return lifecycle.current_champion(NAME, self.store)

    def version(self, number: int) -> lifecycle.ModelVersionInfo:
        return next(info for info in lifecycle.list_versions(NAME, self.store) if info.version == number)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    place = Workplace(tmp_path)
    place.write_rows()
    place.write_candidate(skill=0.6)
    return place


def test_first_good_one_is_champion_once_per_content(workplace: Workplace) -> None:
    folder = write_folder(workplace.root / "a")
    first = workplace.register(folder)
    assert (first["version"], first["alias"], first["reasons"]) == (1, "champion", [])
    assert first["content_sha256"] == content_sha256(folder)
    assert first["comparison"]["champion"] is None
    assert first["comparison"]["gain_over_baselines"]["modal"] == {"value": 0.2, "low": 0.1, "high": 0.3}
    assert workplace.register(shutil.copytree(folder, workplace.root / "copy")) == first
    version = workplace.version(1)
    assert (version.accuracy, version.modal_accuracy, version.target_model) == (0.6, 0.4, "tiny-target")
    assert len(lifecycle.list_versions(NAME, workplace.store)) == 1


def test_worse_than_a_baseline_is_challenger(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    champion = write_folder(workplace.root / "a")
    workplace.register(champion)
    workplace.write_candidate(skill=0.6, gain_over_modal=(-0.1, -0.2, -0.05))
    bad = write_folder(workplace.root / "b", source="mixed")
    found = workplace.register(bad)
    assert (found["version"], found["alias"], found["is_champion"]) == (2, "challenger", False)
    assert "does not beat baseline modal (0.700): gain -0.100" in found["reasons"][0]
    assert workplace.champion() == 1
    assert resolve_model(CHAMPION, workplace.store).version == "1"
    version = workplace.version(2)
    assert version.aliases == ("challenger",)
    assert version.verdict is not None
    assert list(version.verdict.reasons) == found["reasons"]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("register: models:/length-predictor@challenger is version 2, not champion; accuracy 0.600")


def test_better_one_becomes_champion_and_rollback_restores(workplace: Workplace) -> None:
    first = write_folder(workplace.root / "a")
    workplace.register(first)
    workplace.write_candidate(skill=0.9)
    better = write_folder(workplace.root / "b", source="mixed")
    found = workplace.register(better)
    assert (found["version"], found["alias"], found["reasons"]) == (2, "champion", [])
    compared = found["comparison"]["champion"]
    assert (compared["version"], compared["num_rows"]) == ("1", 3 * NUM_CONVERSATIONS)
    assert compared["accuracy_gain"]["value"] == pytest.approx(0.3)
    assert compared["accuracy_gain"]["low"] > 0
    assert compared["crps_difference_tokens"]["high"] < 0
    assert workplace.version(1).aliases == ()

    lifecycle.rollback(NAME, workplace.store)
    assert workplace.champion() == 1
    again = workplace.register(better)  # the pipeline does not undo what somebody did by hand
    assert (again["version"], again["alias"]) == (2, "challenger")
    assert "`tetri models promote 2` brings it back" in again["reasons"][0]
    assert workplace.champion() == 1
    verdict = workplace.version(2).verdict
    assert verdict is not None and not verdict.is_worse  # so that the command needs no --force
    assert workplace.register(better, replace(SETTINGS, allow_worse=True))["alias"] == "champion"


def test_worse_than_the_champion_is_challenger_until_forced(workplace: Workplace) -> None:
    workplace.register(write_folder(workplace.root / "a"))
    workplace.write_candidate(skill=0.3)
    bad = write_folder(workplace.root / "b", source="mixed")
    found = workplace.register(bad)
    assert found["alias"] == "challenger"
    assert "accuracy at 200 tokens is worse than champion version 1 on the same 180 rows" in found["reasons"][0]
    assert "CRPS is worse than champion version 1" in found["reasons"][1]
    assert workplace.champion() == 1

    forced = workplace.register(bad, replace(SETTINGS, allow_worse=True))
    assert (forced["version"], forced["alias"]) == (2, "champion")
    assert "register.allow_worse" in forced["reasons"][0]
    assert workplace.champion() == 2
    assert workplace.version(2).aliases == ("champion",)  # challenger no more
    assert lifecycle.rollback(NAME, workplace.store).version == 1


def test_equal_one_is_not_promoted(workplace: Workplace) -> None:
    workplace.register(write_folder(workplace.root / "a"))
    found = workplace.register(write_folder(workplace.root / "b", source="mixed"))
    assert found["alias"] == "challenger"
    assert found["reasons"][0].startswith("no better than champion version 1")


@pytest.mark.parametrize(
    ("champion", "reason", "alias"),
    [
        ({"champion_target": "other-target"}, "it is for target 'other-target', this one for", "challenger"),
        ({"champion_split": "seed 7"}, "it was trained on other splits (seed 7; here", "challenger"),
        ({"champion_error": "predictor.json has format 1"}, "cannot be loaded (predictor.json has", "champion"),
    ],
)
def test_champion_that_says_nothing_is_named_and_not_compared(
    workplace: Workplace, champion: dict[str, Any], reason: str, alias: str
) -> None:
    workplace.register(write_folder(workplace.root / "a"))
    for name, value in champion.items():
        setattr(workplace, name, value)
    workplace.write_candidate(skill=0.3)
    found = workplace.register(write_folder(workplace.root / "b", source="mixed"))
    assert found["alias"] == alias
    assert reason in found["reasons"][0]
    assert reason in found["comparison"]["champion"]["not_compared"]


def test_no_champion_at_all_when_the_first_is_bad(workplace: Workplace) -> None:
    workplace.write_candidate(skill=0.3, gain_over_modal=(0.01, -0.1, 0.1))
    assert workplace.register(write_folder(workplace.root / "a"))["alias"] == "challenger"
    assert workplace.champion() is None
    with pytest.raises(ConfigurationError, match="tetri models list"):
        resolve_model(CHAMPION, workplace.store)
    lifecycle.promote(NAME, 1, workplace.store, "by hand")
    again = workplace.register(workplace.root / "a")
    assert (again["alias"], again["is_champion"]) == ("champion", True)


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"accuracy_200": 0.5}', '{"accuracy_200": 0.5, "baselines": {}}']
)
def test_without_baselines_the_cure_is_named_and_nothing_registered(workplace: Workplace, content: str | None) -> None:
    evaluation = workplace.root / "evaluate.json"
    evaluation.unlink()
    if content is not None:
        evaluation.write_text(content)
    with pytest.raises(ConfigurationError, match="dvc repro evaluate"):
        workplace.register(write_folder(workplace.root / "a"))
    assert not (workplace.root / "mlruns").exists()
    assert not (workplace.root / "register.json").exists()


def test_scores_of_other_rows_are_refused(workplace: Workplace) -> None:
    workplace.register(write_folder(workplace.root / "a"))
    other = write_folder(workplace.root / "b", source="mixed")
    workplace.rows.write_text(workplace.rows.read_text().replace('"c7"', '"d7"'))
    with pytest.raises(ConfigurationError, match=r"scores 3 rows that .*test.jsonl does not have \(c7:1, ...\)"):
        workplace.register(other)
    predictions = workplace.root / "test_predictions.npz"
    for damaged in (predictions.read_bytes()[:200], b"", b"no archive"):
        predictions.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=r"test_predictions.npz cannot be used .*dvc repro evaluate"):
            workplace.register(other)
    predictions.unlink()
    with pytest.raises(ConfigurationError, match="dvc repro evaluate"):
        workplace.register(other)
    assert len(lifecycle.list_versions(NAME, workplace.store)) == 1


@pytest.mark.parametrize("cap", [None, 250])
@pytest.mark.parametrize("end", [400, 800])
def test_champion_is_scored_as_the_evaluate_stage_scores(cap: int | None, end: int) -> None:
    rng = np.random.default_rng(0)
    edges = tuple(range(0, end + 1, 100))
    drawn = rng.integers(1, 900, 40)
    lengths = drawn if cap is None else np.minimum(drawn, cap)
    rows = [
        LabelledRow(f"{i}", f"{i}", "given", (Message("user", "words"),), int(length), censored=length == cap)
        for i, length in enumerate(lengths)
    ]
    probabilities = rng.dirichlet(np.ones(len(edges) - 1), size=len(rows))
    truth = Truth.of(rows)
    expected = row_scores(truth.forecasts(edges, probabilities), truth.lengths_tokens, (200,), 0.9)
    same = SimpleNamespace(edges_tokens=edges, granularity_tokens=200)
    champion = SimpleNamespace(spec=same, conversation_probabilities=lambda given: probabilities[: len(given)])
    blank = RowScores(truth.ids, truth.roots, truth.lengths_tokens, np.zeros(40), np.zeros(40))
    found = score_champion(champion, rows, blank, same, truth.cap_tokens)
    np.testing.assert_array_equal(found.hits, expected["accuracy_200"])
    np.testing.assert_allclose(found.crps_tokens, expected["crps_tokens"])


def test_champion_of_a_shorter_range_gets_no_easier_task() -> None:
    lengths = np.asarray([150, 350, 999, 450])
    rows = [
        LabelledRow(f"{i}", f"{i}", "given", (Message("user", "words"),), int(length), False)
        for i, length in enumerate(lengths)
    ]
    candidate = SimpleNamespace(edges_tokens=tuple(range(0, 801, 100)), granularity_tokens=200)
    blank = RowScores(tuple("0123"), tuple("0123"), lengths, np.zeros(4), np.zeros(4))
    certain = {400: np.eye(4)[[1, 3, 3, 3]], 1200: np.eye(12)[[1, 3, 11, 4]]}
    hits = {}
    for end, probabilities in certain.items():
        spec = SimpleNamespace(edges_tokens=tuple(range(0, end + 1, 100)))
        champion = SimpleNamespace(spec=spec, conversation_probabilities=lambda _, p=probabilities: p)
        hits[end] = score_champion(champion, rows, blank, candidate, None).hits.tolist()
    assert hits == {400: [True, True, False, False], 1200: [True, True, True, True]}


def test_alias_of_the_worse_is_no_champion_alias(workplace: Workplace) -> None:
    with pytest.raises(ConfigurationError, match=r"register\.alias 'challenger'"):
        workplace.register(write_folder(workplace.root / "a"), replace(SETTINGS, alias="challenger"))


def test_artifacts_are_an_onnx_flavour_with_signature_and_companions(workplace: Workplace) -> None:
    import mlflow
    from mlflow.models import Model

    workplace.register(write_folder(workplace.root / "a"))
    folder = Path(resolve_model(CHAMPION, workplace.store).path)
    model = Model.load(folder)
    assert "onnx" in model.flavors
    assert [(spec.name, spec.shape) for spec in model.signature.inputs.inputs] == [
        ("input_ids", (-1, -1)),
        ("attention_mask", (-1, -1)),
    ]
    assert [(spec.name, spec.shape) for spec in model.signature.outputs.inputs] == [("probabilities", (-1, 4))]
    assert model.metadata["target_model"] == "tiny-target"
    assert {"MLmodel", "model.onnx", "tokenizer.json", "predictor.json"} <= {path.name for path in folder.iterdir()}
    assert len(mlflow.onnx.load_model(str(folder)).graph.output) == 1


def test_moved_store_still_finds_its_artifacts(workplace: Workplace) -> None:
    """MLflow records absolute paths; a copy of the store stands for a moved checkout."""
    workplace.register(write_folder(workplace.root / "a"))
    moved = shutil.copytree(workplace.root / "mlruns", workplace.root / "elsewhere" / "mlruns")
    database = moved / "mlflow.db"
    gone = str(workplace.root)
    database.write_bytes(database.read_bytes().replace(gone.encode(), ("/" + "x" * (len(gone) - 1)).encode()))
    path = Path(resolve_model(CHAMPION, f"sqlite:///{database}").path)
    assert path.is_relative_to(moved)


def test_version_of_the_pipeline_carries_its_origin(trained: Any) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(trained.tracking_uri, trained.tracking_uri)  # MLflow holds another registry from other tests
    version = client.get_model_version_by_alias(NAME, "champion")
    assert version.run_id == load_run_id(trained.checkpoint)
    assert version.tags["target_model"] == "tiny-target"
    assert version.tags["content_sha256"] == content_sha256(trained.export)


def test_registered_model_forecasts_as_the_exported_one(trained: Any) -> None:
    texts = ["essay about rivers", "sum about clocks and letters", "list about nothing at all"]
    folder = LengthPredictor.load(str(trained.export)).predict_texts(texts)
    registered = LengthPredictor.load(CHAMPION, tracking_uri=trained.tracking_uri).predict_texts(texts)
    np.testing.assert_allclose(
        [forecast.probabilities for forecast in registered], [forecast.probabilities for forecast in folder], atol=1e-6
    )
