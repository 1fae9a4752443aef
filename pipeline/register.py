"""Stage register: the exported folder as a version of the registered model, champion if the gate lets it through.

Idempotent: a folder with the same content is registered once. A version that is worse than the baselines or than the
champion in office becomes `challenger`, with the reasons in its tag `verdict` and in `metrics/register.json`; the stage
succeeds all the same. `register.allow_worse` (or `--allow-worse`) makes it champion whatever the gate says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline.export import EXPORT
from pipeline.files import progress, run_stage, write_json
from pipeline.params import RegisterParams, load_params
from pipeline.tracking import load_run_id, tracked_run
from pipeline.train import CHECKPOINT, LABELLED
from serving_plugin.core.errors import ConfigurationError, TetriError
from serving_plugin.predictor import gate, lifecycle
from serving_plugin.predictor.evaluation.scores import Forecasts, Truth, bucket_of
from serving_plugin.predictor.registry import CHALLENGER_ALIAS, default_tracking_uri, find_version_with_content
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import MODEL_FILE, MODEL_FOLDER_FILES, PredictorSpec
from serving_plugin.predictor.target import same_target

if TYPE_CHECKING:
    import onnx
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature

EVALUATION = Path("metrics/evaluate.json")
TEST_PREDICTIONS = Path("models/predictor/evaluation/test_predictions.npz")
TEST_ROWS = LABELLED / "test.jsonl"
METRICS = Path("metrics/register.json")


class Predictor(Protocol):
    """What scoring needs of a `LengthPredictor`."""

    spec: PredictorSpec

    def conversation_probabilities(self, rows: Sequence[LabelledRow], /) -> Any:
        """(rows, fine buckets)."""


def load_predictor(uri: str, tracking_uri: str) -> Predictor:
    """The registered version at run time (ONNX Runtime)."""
    from serving_plugin.predictor.model import LengthPredictor

    predictor: Predictor = LengthPredictor.load(uri, tracking_uri=tracking_uri)
    return predictor


@dataclass(frozen=True, slots=True)
class Championship:
    """What a comparison with the champion reads: the candidate's scores, their rows, and how a version is loaded."""

    predictions: Path = TEST_PREDICTIONS
    test_rows: Path = TEST_ROWS
    load: Callable[[str, str], Predictor] = load_predictor


def register(
    settings: RegisterParams,
    folder: Path,
    evaluation: Path,
    run_id: str,
    metrics: Path,
    tracking_uri: str,
    championship: Championship | None = None,
) -> dict[str, Any]:
    """Register `folder`, point an alias at it; returns what `metrics` holds.

    Raises:
        ConfigurationError: an earlier stage's file is missing or lacks what the gate needs.
    """
    if settings.alias == CHALLENGER_ALIAS:
        raise ConfigurationError(
            f"register.alias {settings.alias!r} is where worse models go; set register.alias champion"
        )
    spec = PredictorSpec.load(folder)
    report = read_evaluation(evaluation, spec.granularity_tokens)
    content = content_sha256(folder)
    with tracked_run(tracking_uri, run_id):
        from mlflow import MlflowClient

        client = MlflowClient()
        known = find_version_with_content(client, settings.name, content)
        in_office = lifecycle.current_champion(settings.name, tracking_uri, settings.alias)
        if known is not None and in_office == int(known):
            number, judged = known, _recorded(client, settings.name, known)
        else:
            opponent = None
            if in_office is not None:
                progress(f"register: compared with {settings.alias} version {in_office}")
                uri = f"models:/{settings.name}/{in_office}"
                opponent = compare_with_champion(
                    str(in_office), uri, spec, championship or Championship(), tracking_uri
                )
            verdict = gate.decide(report, spec.granularity_tokens, opponent, allow_worse=settings.allow_worse)
            if known is not None and not settings.allow_worse:
                verdict = _respect_rollback(client, settings.name, known, verdict)
            judged = _judged(verdict, report, spec.granularity_tokens, opponent)
            scores = {"content_sha256": content, **_scores(report, spec.granularity_tokens)}
            number = known or _create_version(client, settings.name, folder, spec, scores)
            _appoint(client, settings, number, verdict, judged, tracking_uri)
    alias = settings.alias if judged["is_champion"] else CHALLENGER_ALIAS
    result = {"name": settings.name, "version": int(number), "alias": alias, "content_sha256": content, **judged}
    write_json(metrics, result)
    progress(_summary(result, settings.alias, is_new=known is None))
    return result


def read_evaluation(path: Path, granularity_tokens: int) -> dict[str, Any]:
    """The evaluation report, checked for what the gate needs.

    Raises:
        ConfigurationError: no such file, not JSON, or it lacks the accuracy or the baselines at this granularity.
    """
    try:
        report = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"evaluation {path} cannot be read ({error}); run `dvc repro evaluate`") from None
    gate.accuracy_of(report, granularity_tokens)
    gate.baseline_gains(report, granularity_tokens)
    return report


def compare_with_champion(
    number: str, uri: str, candidate: PredictorSpec, championship: Championship, tracking_uri: str
) -> gate.ChampionComparison | gate.NotCompared:
    """Score the champion on the candidate's test rows; one that cannot be loaded or serves another target says so.

    Raises:
        ConfigurationError: the candidate's scores or their rows are missing or of different runs.
    """
    scores = read_test_scores(championship.predictions, candidate.granularity_tokens)
    rows = read_rows(championship.test_rows)
    asked = rows_of_scores(scores, rows, championship)
    try:
        champion = championship.load(uri, tracking_uri)
    except TetriError as error:
        return gate.NotCompared(number, f"it cannot be loaded ({error})")
    if not same_target(champion.spec.target_model, candidate.target_model):
        return gate.NotCompared(
            number,
            f"it is for target {champion.spec.target_model!r}, this one for {candidate.target_model!r}: "
            "give each target a model of its own (register.name)",
            holds_office=True,
        )
    if champion.spec.split != candidate.split:
        return gate.NotCompared(
            number,
            f"it was trained on other splits ({champion.spec.split or 'unknown'}; here {candidate.split}), "
            "so that it may know these test rows",
            holds_office=True,
        )
    return gate.compare(number, scores, score_champion(champion, asked, scores, candidate, Truth.of(rows).cap_tokens))


def score_champion(
    champion: Predictor,
    rows: Sequence[LabelledRow],
    scores: gate.RowScores,
    candidate: PredictorSpec,
    cap_tokens: int | None,
) -> gate.RowScores:
    """The champion's scores as the evaluate stage computes the candidate's, at its granularity and over its buckets.

    Args:
        rows: (rows,) what to forecast, in the order of `scores`.
        scores: the candidate's, whose ids, conversations and true lengths are taken over.
        cap_tokens: where the split's replies were cut, see `scores.Truth`.
    """
    once = {row.id: row for row in rows}  # samples of one reply share their forecast
    place = {row_id: i for i, row_id in enumerate(once)}
    chosen = [place[row.id] for row in rows]
    probabilities = np.asarray(champion.conversation_probabilities(list(once.values())))[chosen]
    forecasts = Forecasts.from_weights(champion.spec.edges_tokens, probabilities).clipped(cap_tokens)
    lengths, width, end = scores.lengths_tokens, candidate.granularity_tokens, candidate.edges_tokens[-1]
    # over the candidate's buckets: a champion of a shorter range would have an easier task, of a longer a harder one
    num_buckets = -(-(end if cap_tokens is None else min(end, cap_tokens + 1)) // width)
    predicted = forecasts.clipped(end - 1).regrouped(width).argmax(axis=1)
    return replace(
        scores,
        hits=predicted == bucket_of(lengths, width, num_buckets),
        crps_tokens=forecasts.crps_tokens(lengths),
    )


def read_test_scores(path: Path, granularity_tokens: int) -> gate.RowScores:
    """What the evaluate stage left of the candidate, row by row.

    Raises:
        ConfigurationError: no such file, it is damaged, or it lacks an array.
    """
    try:
        # opened here, since NumPy leaves a damaged file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return gate.RowScores(
                ids=tuple(map(str, arrays["ids"])),
                roots=tuple(map(str, arrays["roots"])),
                lengths_tokens=arrays["lengths_tokens"],
                hits=arrays[f"hit_{granularity_tokens}"],
                crps_tokens=arrays["crps_tokens"].astype(np.float64),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"test predictions {path} cannot be used ({error}); run `dvc repro evaluate`"
        ) from None


def rows_of_scores(
    scores: gate.RowScores, rows: Sequence[LabelledRow], championship: Championship
) -> list[LabelledRow]:
    """The labelled row of each score, in order.

    Raises:
        ConfigurationError: a score is of a row that the labelled data does not have.
    """
    by_id = {row.id: row for row in rows}
    missing = [row_id for row_id in scores.ids if row_id not in by_id]
    if missing:
        raise ConfigurationError(
            f"{championship.predictions} scores {len(missing)} rows that {championship.test_rows} does not have "
            f"({missing[0]}, ...); run `dvc repro evaluate`"
        )
    return [by_id[row_id] for row_id in scores.ids]


def _scores(report: Mapping[str, Any], width: int) -> dict[str, str]:
    """The scores that the version's tags hold."""
    accuracy = gate.accuracy_of(report, width)
    modal = accuracy - gate.baseline_gains(report, width)["modal"].value
    return {f"accuracy_{width}": f"{accuracy:.4f}", f"modal_accuracy_{width}": f"{modal:.4f}"}


def _judged(
    verdict: gate.Verdict,
    report: Mapping[str, Any],
    width: int,
    opponent: gate.ChampionComparison | gate.NotCompared | None,
) -> dict[str, Any]:
    """What the version's tag and the stage's metrics say of it."""
    gains = {name: gain.to_plain() for name, gain in gate.baseline_gains(report, width).items()}
    return {
        "is_champion": verdict.is_champion,
        "is_worse": verdict.is_worse,
        "reasons": list(verdict.reasons),
        "comparison": {
            "granularity_tokens": width,
            "gain_over_baselines": gains,
            "champion": None if opponent is None else opponent.to_plain(),
        },
    }


def _recorded(client: MlflowClient, name: str, number: str) -> dict[str, Any]:
    """What was said of the version in office when it was appointed, or promoted by hand since."""
    try:
        judged = dict(json.loads(client.get_model_version(name, number).tags[lifecycle.VERDICT_TAG]))
    except (KeyError, TypeError, ValueError):
        judged = {"reasons": ["in office since before verdicts were recorded"], "comparison": None}
    return {**judged, "is_champion": True}


def _respect_rollback(client: MlflowClient, name: str, number: str, verdict: gate.Verdict) -> gate.Verdict:
    """A version that somebody rolled back stays back until somebody promotes it."""
    rolled_back = client.get_model_version(name, number).tags.get(lifecycle.ROLLED_BACK_TAG)
    if not rolled_back:
        return verdict
    reason = f"version {number} was rolled back {rolled_back}; `tetri models promote {number}` brings it back"
    return gate.Verdict(False, (reason, *verdict.reasons), verdict.is_worse)


def _appoint(
    client: MlflowClient,
    settings: RegisterParams,
    number: str,
    verdict: gate.Verdict,
    judged: dict[str, Any],
    tracking_uri: str,
) -> None:
    more = {"comparison": judged["comparison"]}
    client.set_model_version_tag(settings.name, number, lifecycle.VERDICT_TAG, verdict.to_json(**more))
    if not verdict.is_champion:
        lifecycle.set_challenger(settings.name, int(number), tracking_uri)
        return
    why = "; ".join(verdict.reasons) or "passed the gate"
    lifecycle.promote(settings.name, int(number), tracking_uri, f"register: {why}", alias=settings.alias)


def _summary(result: Mapping[str, Any], champion_alias: str, *, is_new: bool) -> str:
    note = "" if is_new else " (this content was registered before)"
    line = f"register: models:/{result['name']}@{result['alias']} is version {result['version']}{note}"
    if not result["is_champion"]:
        line += f", not {champion_alias}"
    return "; ".join([line, *result["reasons"]]) if result["reasons"] else line


def content_sha256(folder: Path) -> str:
    """Hash of all that a predictor is."""
    digest = hashlib.sha256()
    for name in MODEL_FOLDER_FILES:
        with (folder / name).open("rb") as file:
            digest.update(name.encode() + b"\x00" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _create_version(client: Any, name: str, folder: Path, spec: PredictorSpec, tags: dict[str, str]) -> str:
    """Log the folder as an MLflow model of the ONNX flavour and register it; returns the version's number."""
    import mlflow
    import onnx

    model = onnx.load(folder / MODEL_FILE)
    with warnings.catch_warnings():
        # MLflow 3.17 says this of a class of its own when its pyfunc module is imported
        warnings.filterwarnings("ignore", ".*Any type hint is inferred as AnyType", UserWarning)
        logged = mlflow.onnx.log_model(
            model,
            name="predictor",
            signature=_signature(model),
            save_as_external_data=False,
            # given, since MLflow would find them out by loading the model in a new process
            pip_requirements=[f"{package}=={version(package)}" for package in ("mlflow", "onnx", "tokenizers")]
            + ["onnxruntime"],
            metadata={
                "target_model": spec.target_model,
                "edges_tokens": list(spec.edges_tokens),
                "granularity_tokens": spec.granularity_tokens,
            },
        )
    # beside model.onnx, so that the version's artifacts are a predictor folder as they are
    for extra in MODEL_FOLDER_FILES:
        if extra != MODEL_FILE:
            client.log_model_artifact(logged.model_id, str(folder / extra))
    registered = mlflow.register_model(logged.model_uri, name, tags={"target_model": spec.target_model, **tags})
    return str(registered.version)


def _signature(model: onnx.ModelProto) -> ModelSignature:
    """The graph's own inputs and outputs; a dimension without a fixed size is -1."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec
    from onnx.helper import tensor_dtype_to_np_dtype

    def schema_of(values: Iterable[onnx.ValueInfoProto]) -> Schema:
        specs: list[ColSpec | TensorSpec] = []
        for value in values:
            tensor = value.type.tensor_type
            shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
            specs.append(TensorSpec(tensor_dtype_to_np_dtype(tensor.elem_type), shape, value.name))
        return Schema(specs)

    return ModelSignature(inputs=schema_of(model.graph.input), outputs=schema_of(model.graph.output))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.register", description="Register the exported predictor.")
    parser.add_argument("--allow-worse", action="store_true", help="champion whatever the gate says")
    options = parser.parse_args(argv)
    settings = load_params().register
    if options.allow_worse:
        settings = replace(settings, allow_worse=True)
    register(settings, EXPORT, EVALUATION, load_run_id(CHECKPOINT), METRICS, default_tracking_uri())


if __name__ == "__main__":
    run_stage(main)
