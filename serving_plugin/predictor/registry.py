"""Where a predictor lies: `models:/NAME@ALIAS`, `models:/NAME/VERSION` or a folder.

MLflow is imported inside functions only: a serving process resolves in a short child (`resolve_model_in_child`) and
stays small. `python -m serving_plugin.predictor.registry URI` is that child.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from serving_plugin.core.errors import ConfigurationError, TetriError
from serving_plugin.predictor.spec import MODEL_FOLDER_FILES, PredictorSpec

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULT_TRACKING_URI = "sqlite:///mlruns/mlflow.db"
CHAMPION_ALIAS = "champion"  # what serving loads
CHALLENGER_ALIAS = "challenger"  # the last registered version that the gate (predictor/gate.py) did not let through
DEFAULT_MODEL_NAME = "length-predictor"
DEFAULT_MODEL_URI = f"models:/{DEFAULT_MODEL_NAME}@{CHAMPION_ALIAS}"
CHILD_TIMEOUT_S = 180.0

_SCHEME = "models:/"
_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
_NOT_FOUND = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # the second for an alias
_CURE = (
    "run `dvc repro` (`dvc repro -f register` if it ran before), promote a version (`tetri models list`), "
    "or give a predictor folder"
)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A predictor folder on this machine. `version` is empty for a plain folder."""

    path: str
    name: str
    version: str
    target_model: str
    uri: str


def default_tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, else the sqlite store under the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def quiet_mlflow() -> None:
    """Before MLflow is imported: no telemetry, no line per database migration or retry, no minutes of waiting.

    By itself MLflow waits 120 s for an answer and asks 7 times more, up to 2 minutes apart.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def sqlite_path(tracking_uri: str) -> Path | None:
    """Database file of a sqlite tracking URI; None for a server's."""
    prefix = "sqlite:///"
    return Path(tracking_uri.removeprefix(prefix)) if tracking_uri.startswith(prefix) else None


def require_store(store: str, wanted: str) -> None:
    """Check that the registry exists, and quiet MLflow, before MLflow is imported.

    Raises:
        ConfigurationError: a sqlite store without a database file, which MLflow would create empty.
    """
    database = sqlite_path(store)
    if database is not None and not database.is_file():
        raise ConfigurationError(f"registry {store} does not exist, so {wanted} cannot be found; {_CURE}")
    quiet_mlflow()


@contextmanager
def registry_client(store: str, wanted: str) -> Iterator[MlflowClient]:
    """A client of a registry; what fails inside of the block becomes one line.

    Raises:
        ConfigurationError: no such registry, it is none, or it does not answer.
    """
    require_store(store, wanted)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield MlflowClient(tracking_uri=store, registry_uri=store)
    except (MlflowException, SQLAlchemyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"registry {store} does not serve {wanted} ({reason}); check --tracking-uri or MLFLOW_TRACKING_URI"
        ) from None


def resolve_model(uri: str, tracking_uri: str | None = None) -> ResolvedModel:
    """Find a predictor in this process.

    Raises:
        ConfigurationError: no such registry, model, alias, version or folder, or the registry does not answer.
    """
    if not uri.startswith(_SCHEME):
        return _resolve_folder(uri)
    match = _REGISTERED.fullmatch(uri)
    if match is None:
        raise ConfigurationError(
            f"model URI {uri!r} is neither models:/NAME@ALIAS nor models:/NAME/VERSION nor a folder"
        )
    store = tracking_uri or default_tracking_uri()
    with registry_client(store, uri) as client:
        return _resolve_registered(client, uri, match["name"], match["alias"], match["version"], store)


def resolve_model_in_child(uri: str, tracking_uri: str | None = None) -> ResolvedModel:
    """`resolve_model` without importing MLflow here: about 300 MB and three seconds stay in a child that ends.

    Raises:
        ConfigurationError: as `resolve_model`, or the child did not answer in time.
    """
    if not uri.startswith(_SCHEME):
        return _resolve_folder(uri)
    command = [sys.executable, "-m", "serving_plugin.predictor.registry", uri]
    command += ["--tracking-uri", tracking_uri or default_tracking_uri()]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"registry gave no answer for {uri} within {CHILD_TIMEOUT_S:.0f} s; check --tracking-uri"
        ) from None
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise ConfigurationError(lines[-1])
    return ResolvedModel(**json.loads(child.stdout.splitlines()[-1]))


def _resolve_folder(uri: str) -> ResolvedModel:
    folder = Path(uri)
    if not folder.is_dir():
        raise ConfigurationError(f"predictor folder {uri!r} does not exist; {_CURE}")
    missing = [name for name in MODEL_FOLDER_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigurationError(f"{uri} is no predictor folder: {', '.join(missing)} missing; {_CURE}")
    spec = PredictorSpec.load(folder)
    return ResolvedModel(str(folder.resolve()), folder.resolve().name, "", spec.target_model, uri)


def _resolve_registered(
    client: MlflowClient, uri: str, name: str, alias: str | None, version: str | None, store: str
) -> ResolvedModel:
    from mlflow import artifacts
    from mlflow.exceptions import MlflowException

    try:
        if alias is not None:
            found = client.get_model_version_by_alias(name, alias)
        else:
            found = client.get_model_version(name, str(version))
        recorded = client.get_model_version_download_uri(name, found.version)
        if recorded.startswith(_SCHEME):
            recorded = client.get_logged_model(recorded.removeprefix(_SCHEME)).artifact_location
        folder = _local_folder(recorded, store)
        if folder is None:
            folder = Path(artifacts.download_artifacts(artifact_uri=recorded, tracking_uri=store))
    except MlflowException as error:
        if error.error_code not in _NOT_FOUND:
            raise
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"registry {store} has no {uri} ({reason}); {_CURE}") from None
    except OSError as error:
        raise ConfigurationError(f"artifacts of {uri} are not readable ({error}); {_CURE}") from None
    resolved = _resolve_folder(str(folder))
    return ResolvedModel(resolved.path, name, str(found.version), resolved.target_model, uri)


def _local_folder(recorded: str, store: str) -> Path | None:
    """Folder of a local artifact location; None for a remote one.

    MLflow records absolute locations: in a moved checkout the folder is looked for beside the database.
    """
    parsed = urlparse(recorded)
    if parsed.scheme not in ("", "file"):
        return None
    folder = Path(unquote(parsed.path))
    database = sqlite_path(store)
    if folder.is_dir() or database is None:
        return folder
    _, marker, inside = str(folder).partition(f"/{database.parent.name}/artifacts/")
    return database.parent / "artifacts" / inside if marker else folder


def find_version_with_content(client: MlflowClient, name: str, content_sha256: str) -> str | None:
    """Registered version whose tag `content_sha256` equals this hash, or None."""
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.tags.get("content_sha256") == content_sha256:
            return str(version.version)
    return None


def main(argv: list[str] | None = None) -> int:
    """Print the resolved model as one line of JSON; one line on stderr and exit code 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m serving_plugin.predictor.registry")
    parser.add_argument("uri")
    parser.add_argument("--tracking-uri", default=None)
    arguments = parser.parse_args(argv)
    try:
        print(json.dumps(asdict(resolve_model(arguments.uri, arguments.tracking_uri))))
    except TetriError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
