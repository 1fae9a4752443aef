"""One MLflow run from training to registration."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.files import write_json
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.registry import quiet_mlflow, sqlite_path

logger = logging.getLogger(__name__)

EXPERIMENT = "length-predictor"
RUN_FILE = "run.json"


@contextmanager
def tracked_run(tracking_uri: str, run_id: str | None = None, name: str | None = None) -> Iterator[str]:
    """Start a run of the experiment, or carry on `run_id`; yields the run's id.

    A run that this store does not know (models pulled from another machine) is replaced by a new one, with a warning.
    """
    quiet_mlflow()
    import mlflow
    from mlflow.exceptions import MlflowException

    database = sqlite_path(tracking_uri)
    if database is not None:
        database.parent.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(tracking_uri)
    mlflow.set_registry_uri(tracking_uri)
    _ensure_experiment(tracking_uri)
    if run_id is not None:
        try:
            mlflow.get_run(run_id)
        except MlflowException:
            logger.warning("run %s is not in %s: a new run is started", run_id, tracking_uri)
            run_id = None
    with mlflow.start_run(run_id=run_id, run_name=None if run_id else name) as run:
        yield run.info.run_id


def _ensure_experiment(tracking_uri: str) -> None:
    import mlflow

    if mlflow.get_experiment_by_name(EXPERIMENT) is None:
        database = sqlite_path(tracking_uri)
        location = None if database is None else (database.parent.resolve() / "artifacts").as_uri()
        mlflow.create_experiment(EXPERIMENT, artifact_location=location)
    mlflow.set_experiment(EXPERIMENT)


def save_run_id(folder: Path, run_id: str) -> None:
    """Leave the run's id beside the checkpoint, for the stages that follow."""
    write_json(folder / RUN_FILE, {"run_id": run_id})


def load_run_id(folder: Path) -> str:
    """The id that training left.

    Raises:
        ConfigurationError: there is no checkpoint, or no id in it.
    """
    path = folder / RUN_FILE
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{path} holds no run id ({error}); run `dvc repro train`") from None
