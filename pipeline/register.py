"""Stage register: the exported folder as a version of the registered model, under the alias that serving loads.

Idempotent: a folder with the same content is registered once. A model that does worse than always naming the modal
bucket is refused unless `register.allow_worse` (or `--allow-worse`) says otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.export import EXPORT
from pipeline.files import progress, run_stage, write_json
from pipeline.params import RegisterParams, load_params
from pipeline.tracking import load_run_id, tracked_run
from pipeline.train import CHECKPOINT
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.registry import default_tracking_uri, find_version_with_content
from serving_plugin.predictor.spec import MODEL_FILE, MODEL_FOLDER_FILES, SPEC_FILE, TOKENIZER_FILE, PredictorSpec

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

EVALUATION = Path("metrics/evaluate.json")
METRICS = Path("metrics/register.json")


def register(
    settings: RegisterParams, folder: Path, evaluation: Path, run_id: str, metrics: Path, tracking_uri: str
) -> dict[str, Any]:
    """Register `folder`, point the alias at it; returns what `metrics` holds.

    Raises:
        ConfigurationError: the model does worse than the modal bucket, or an earlier stage's file is missing.
    """
    spec = PredictorSpec.load(folder)
    scores = require_better_than_modal(spec, evaluation, settings.allow_worse)
    content = content_sha256(folder)
    with tracked_run(tracking_uri, run_id):
        from mlflow import MlflowClient

        client = MlflowClient()
        number = find_version_with_content(client, settings.name, content)
        is_new = number is None
        if number is None:
            number = _create_version(client, settings.name, folder, spec, {"content_sha256": content, **scores})
        client.set_registered_model_alias(settings.name, settings.alias, number)
    report = {"name": settings.name, "version": int(number), "alias": settings.alias, "content_sha256": content}
    write_json(metrics, report)
    note = "" if is_new else " (this content was registered before)"
    progress(f"register: models:/{settings.name}@{settings.alias} is version {number}{note}")
    return report


def require_better_than_modal(spec: PredictorSpec, evaluation: Path, allow_worse: bool) -> dict[str, str]:
    """The scores that the version's tags will hold.

    Raises:
        ConfigurationError: accuracy at the published granularity is below the modal bucket's, or is not known.
    """
    width = spec.granularity_tokens
    keys = (f"accuracy_{width}", f"modal_accuracy_{width}")
    try:
        report = json.loads(evaluation.read_text(encoding="utf-8"))
        accuracy, modal = (float(report[key]) for key in keys)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"{evaluation} has no {' and '.join(keys)} ({error}); run `dvc repro evaluate`"
        ) from None
    if accuracy < modal and not allow_worse:
        raise ConfigurationError(
            f"accuracy {accuracy:.3f} at {width} tokens is worse than always naming the modal bucket ({modal:.3f}); "
            "train on more rows or longer, or set register.allow_worse (--allow-worse)"
        )
    return {key: f"{value:.4f}" for key, value in zip(keys, (accuracy, modal), strict=True)}


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

    with warnings.catch_warnings():
        # MLflow 3.17 says this of a class of its own when its pyfunc module is imported
        warnings.filterwarnings("ignore", ".*Any type hint is inferred as AnyType", UserWarning)
        logged = mlflow.onnx.log_model(
            onnx.load(folder / MODEL_FILE),
            name="predictor",
            signature=_signature(spec),
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
    for extra in (TOKENIZER_FILE, SPEC_FILE):
        client.log_model_artifact(logged.model_id, str(folder / extra))
    registered = mlflow.register_model(logged.model_uri, name, tags={"target_model": spec.target_model, **tags})
    return str(registered.version)


def _signature(spec: PredictorSpec) -> ModelSignature:
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    tokens = np.dtype(np.int64)
    inputs: list[ColSpec | TensorSpec] = [
        TensorSpec(tokens, (-1, -1), "input_ids"),
        TensorSpec(tokens, (-1, -1), "attention_mask"),
    ]
    outputs: list[ColSpec | TensorSpec] = [TensorSpec(np.dtype(np.float32), (-1, spec.num_buckets), "probabilities")]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.register", description="Register the exported predictor.")
    parser.add_argument("--allow-worse", action="store_true", help="also one that does worse than the modal bucket")
    options = parser.parse_args(argv)
    settings = load_params().register
    if options.allow_worse:
        settings = RegisterParams(settings.name, settings.alias, allow_worse=True)
    register(settings, EXPORT, EVALUATION, load_run_id(CHECKPOINT), METRICS, default_tracking_uri())


if __name__ == "__main__":
    run_stage(main)
