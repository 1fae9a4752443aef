"""`tetri models` and the champion's history, on a real sqlite store of MLflow."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from serving_plugin.cli import models
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor import lifecycle
from serving_plugin.predictor.gate import Verdict
from serving_plugin.predictor.registry import quiet_mlflow

NAME = "length-predictor"
MakeStore = Callable[..., str]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """A store with versions 1, 2, ... whose tags are given; returns its URI."""

    def make(*tags: dict[str, str]) -> str:
        client = client_of(f"sqlite:///{tmp_path / 'mlflow.db'}")
        client.create_registered_model(NAME)
        folder = tmp_path / "folder"
        folder.mkdir()
        for given in tags:
            client.create_model_version(NAME, source=str(folder), tags={"target_model": "tiny-target", **given})
        return f"sqlite:///{tmp_path / 'mlflow.db'}"

    return make


def client_of(store: str) -> Any:
    quiet_mlflow()
    from mlflow import MlflowClient

    return MlflowClient(store, store)


def champion(store: str) -> int | None:
    return lifecycle.current_champion(NAME, store)


def invoke(store: str, *arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    models.register(app)
    return CliRunner().invoke(app, ["models", *arguments, "--tracking-uri", store], env={"COLUMNS": "180"})


def test_rollback_restores_and_goes_further_back(make_store: MakeStore) -> None:
    store = make_store({}, {}, {}, {})
    for version in (1, 2, 3):
        assert lifecycle.promote(NAME, version, store, "test").version == version
    assert lifecycle.rollback(NAME, store) == lifecycle.Move(NAME, 2, 3, "rollback from version 3")
    assert champion(store) == 2
    assert lifecycle.rollback(NAME, store).version == 1
    with pytest.raises(ConfigurationError, match="no champion before version 1 to roll back to"):
        lifecycle.rollback(NAME, store)
    assert champion(store) == 1

    assert lifecycle.promote(NAME, 4, store, "test").previous == 1  # a promotion starts from there
    assert lifecycle.rollback(NAME, store).version == 1
    aliases = [info.aliases for info in lifecycle.list_versions(NAME, store)]
    assert aliases == [(), (), (), ("champion",)]


def test_alias_moved_by_somebody_else_is_taken_into_the_history(make_store: MakeStore) -> None:
    store = make_store({}, {}, {})
    client = client_of(store)
    client.set_registered_model_alias(NAME, "champion", "1")  # before there was a history
    lifecycle.promote(NAME, 2, store, "test")
    client.set_registered_model_alias(NAME, "champion", "3")
    assert lifecycle.rollback(NAME, store).version == 2
    assert lifecycle.rollback(NAME, store).version == 1

    lifecycle.promote(NAME, 3, store, "test")
    client.delete_registered_model_alias(NAME, "champion")
    restored = lifecycle.rollback(NAME, store)
    assert (restored.version, restored.previous) == (3, None)


def test_deleted_versions_are_passed_over(make_store: MakeStore) -> None:
    store = make_store({}, {}, {})
    for version in (1, 2, 3):
        lifecycle.promote(NAME, version, store, "test")
    client_of(store).delete_model_version(NAME, "2")
    assert lifecycle.rollback(NAME, store).version == 1


def test_history_that_is_not_ours_is_replaced(make_store: MakeStore) -> None:
    store = make_store({}, {})
    client_of(store).set_registered_model_tag(NAME, lifecycle.history_tag(), "[{}, nonsense")
    lifecycle.promote(NAME, 1, store, "test")
    lifecycle.promote(NAME, 2, store, "x" * 5000)
    history = json.loads(client_of(store).get_registered_model(NAME).tags["champion_history"])
    assert [entry["version"] for entry in history] == [1, 2]
    assert len(history[1]["reason"]) == lifecycle.MAX_REASON_CHARS
    assert history[0]["at"].endswith("Z")


def test_marks_of_a_version_follow_its_moves(make_store: MakeStore) -> None:
    store = make_store({}, {})
    lifecycle.promote(NAME, 1, store, "test")
    lifecycle.set_challenger(NAME, 2, store)
    assert lifecycle.list_versions(NAME, store)[0].aliases == ("challenger",)
    lifecycle.promote(NAME, 2, store, "test")
    assert lifecycle.list_versions(NAME, store)[0].aliases == ("champion",)
    lifecycle.rollback(NAME, store)
    assert "to version 1" in lifecycle.list_versions(NAME, store)[0].rolled_back
    lifecycle.promote(NAME, 2, store, "test")
    assert lifecycle.list_versions(NAME, store)[0].rolled_back == ""


def test_list_shows_scores_and_verdicts(make_store: MakeStore) -> None:
    worse = Verdict(False, ("accuracy is worse than champion version 1", "CRPS is worse"), is_worse=True)
    scores = {"accuracy_200": "0.5293", "modal_accuracy_200": "0.3989"}
    store = make_store(
        {**scores, "verdict": Verdict(True).to_json()}, {**scores, "verdict": worse.to_json()}, {"verdict": "?"}
    )
    lifecycle.promote(NAME, 1, store, "test")
    lifecycle.set_challenger(NAME, 2, store)
    shown = invoke(store, "list")
    assert shown.exit_code == 0, shown.output
    for text in ("3 versions", "champion", "challenger", "tiny-target", "0.529 at 200", "0.399", "(+1 more)", "passed"):
        assert text in shown.output

    third, second, first = json.loads(invoke(store, "list", "--json").output)
    assert (third["version"], third["accuracy"], third["verdict"], third["aliases"]) == (3, None, None, [])
    assert second["verdict"] == {"is_champion": False, "is_worse": True, "reasons": list(worse.reasons)}
    assert (first["aliases"], first["accuracy"], first["modal_accuracy"]) == (["champion"], 0.5293, 0.3989)
    assert first["granularity_tokens"] == 200


def test_promote_and_rollback_say_who_was_champion(make_store: MakeStore) -> None:
    store = make_store({}, {})
    first = invoke(store, "promote", "1")
    assert "version 1 is champion; nobody was champion before" in first.output
    moved = json.loads(invoke(store, "promote", "2", "--reason", "by hand", "--json").output)
    assert moved == {"name": NAME, "version": 2, "previous": 1, "reason": "by hand"}
    back = invoke(store, "rollback")
    assert "version 1 is champion; version 2 was champion before" in back.output
    assert champion(store) == 1


def test_worse_version_is_promoted_by_force_only(make_store: MakeStore) -> None:
    store = make_store({}, {"verdict": Verdict(False, ("too bad",), is_worse=True).to_json()})
    lifecycle.promote(NAME, 1, store, "test")
    refused = invoke(store, "promote", "2")
    assert isinstance(refused.exception, ConfigurationError)
    assert "version 2 of length-predictor was found worse (too bad); --force" in str(refused.exception)
    assert champion(store) == 1
    assert invoke(store, "promote", "2", "--force").exit_code == 0
    assert champion(store) == 2


def test_version_that_was_not_compared_is_promoted_without_force(make_store: MakeStore) -> None:
    store = make_store(
        {}, {"verdict": Verdict(False, ("not compared with champion version 1: other splits",)).to_json()}
    )
    lifecycle.promote(NAME, 1, store, "test")
    assert "undecided: not compared" in invoke(store, "list").output
    assert invoke(store, "promote", "2").exit_code == 0
    assert champion(store) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "--name", "other"), "has no model 'other' (it has: length-predictor)"),
        (("promote", "9"), "has no version 9 (newest: 1, 2)"),
        (("promote", "1"), "version 1 of length-predictor is already champion"),
        (("rollback",), "has no champion before version 1 to roll back to"),
        (("rollback", "--name", "other"), "has no model 'other'"),
    ],
)
def test_wrong_use_names_the_cure(make_store: MakeStore, arguments: tuple[str, ...], message: str) -> None:
    store = make_store({}, {})
    lifecycle.promote(NAME, 1, store, "test")
    error = invoke(store, *arguments).exception
    assert isinstance(error, ConfigurationError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_registry_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    error = invoke(f"sqlite:///{tmp_path}/none.db", "list").exception
    assert isinstance(error, ConfigurationError)
    assert "does not exist" in str(error)
    assert not (tmp_path / "none.db").exists()


def test_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database " * 10)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    error = invoke(store, "list").exception
    assert isinstance(error, ConfigurationError)
    assert f"registry {store} does not serve" in str(error) and "file is not a database" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("command", [("models", "list"), ("models", "promote", "1"), ("predict", "hello")])
def test_registry_that_does_not_answer_is_one_line_within_seconds(command: tuple[str, ...]) -> None:
    store = "http://127.0.0.1:9"
    began = time.monotonic()
    failed = subprocess.run(
        [sys.executable, "-m", "serving_plugin.cli.main", *command, "--tracking-uri", store],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert time.monotonic() - began < 30  # most of it are imports
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"error: registry {store} does not serve")
    assert failed.stderr.endswith("check --tracking-uri or MLFLOW_TRACKING_URI\n")
    assert failed.stderr.count("\n") == 1


def test_command_line_gives_one_line_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "serving_plugin.cli.main", "models"]
    store = ("--tracking-uri", f"sqlite:///{tmp_path}/none.db")
    failed = subprocess.run([*command, "rollback", *store], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: registry")
    assert failed.stderr.count("\n") == 1
    helped = subprocess.run([*command, "promote", "--help"], capture_output=True, text=True)
    assert helped.returncode == 0
    assert "Examples:" in helped.stdout
