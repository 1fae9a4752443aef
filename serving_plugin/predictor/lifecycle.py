"""Versions of a registered predictor and who is champion: list, promote, roll back.

The alias says who is champion now; the registered model's tag `champion_history` (JSON, oldest first, the current one
last) says who was before. It is a stack: `promote` pushes, `rollback` pops, so a rollback after a rollback goes further
back and a promotion after it starts from there. An alias that somebody moved without us is taken into the history at
the next move. MLflow is imported inside functions only.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.gate import Verdict
from serving_plugin.predictor.registry import CHALLENGER_ALIAS, CHAMPION_ALIAS, registry_client

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

VERDICT_TAG = "verdict"
ROLLED_BACK_TAG = "rolled_back"
MAX_HISTORY = 100  # a tag holds 100,000 characters
MAX_REASON_CHARS = 300

_MODAL_TAG = re.compile(r"modal_accuracy_(?P<width>\d+)")


@dataclass(frozen=True, slots=True)
class ModelVersionInfo:
    """One version, as its tags describe it; scores are shares of rows at `granularity_tokens`, NaN when unknown."""

    version: int
    aliases: tuple[str, ...]
    target_model: str
    granularity_tokens: int | None
    accuracy: float
    modal_accuracy: float
    verdict: Verdict | None
    rolled_back: str
    created: str


@dataclass(frozen=True, slots=True)
class Move:
    """What happened to the champion alias. `previous` is None when nobody was champion."""

    name: str
    version: int
    previous: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    at: str
    reason: str


def list_versions(name: str, store: str) -> list[ModelVersionInfo]:
    """All versions of a registered model, newest first.

    Raises:
        ConfigurationError: no such registry or model.
    """
    with _client(name, store) as client:
        aliases: dict[int, list[str]] = {}
        for alias, version in _registered(client, name, store).aliases.items():  # version searches leave aliases out
            aliases.setdefault(int(version), []).append(alias)
        found = []
        for version in client.search_model_versions(f"name = '{name}'"):
            number, tags = int(version.version), version.tags
            widths = sorted(int(match["width"]) for match in map(_MODAL_TAG.fullmatch, tags) if match)
            width = widths[0] if widths else None
            found.append(
                ModelVersionInfo(
                    version=number,
                    aliases=tuple(sorted(aliases.get(number, ()))),
                    target_model=tags.get("target_model", ""),
                    granularity_tokens=width,
                    accuracy=_number(tags.get(f"accuracy_{width}")),
                    modal_accuracy=_number(tags.get(f"modal_accuracy_{width}")),
                    verdict=Verdict.from_json(tags.get(VERDICT_TAG, "")),
                    rolled_back=tags.get(ROLLED_BACK_TAG, ""),
                    created=_time(version.creation_timestamp / 1000),
                )
            )
        return sorted(found, key=lambda info: -info.version)


def current_champion(name: str, store: str, alias: str = CHAMPION_ALIAS) -> int | None:
    """The version under the alias; None when there is none, or no such model or registry yet.

    Raises:
        ConfigurationError: no such registry.
    """
    with _client(name, store) as client:
        return _version_under(_find(client, name), alias)


def promote(name: str, version: int, store: str, reason: str, *, alias: str = CHAMPION_ALIAS) -> Move:
    """Make a version champion. The one before loses the alias and gets no other.

    Args:
        reason: one line for the history.

    Raises:
        ConfigurationError: no such registry, model or version, or it is champion already.
    """
    with _client(name, store) as client:
        model = _registered(client, name, store)
        versions = _versions(client, name)
        if version not in versions:
            raise ConfigurationError(_unknown_version(name, version, versions))
        previous = _version_under(model, alias)
        if previous == version:
            raise ConfigurationError(
                f"version {version} of {name} is already {alias}; `tetri models list` shows the others"
            )
        stack = _history(model, alias, previous)
        # alias first: a crash in between leaves a move that the next one takes into the history
        client.set_registered_model_alias(name, alias, str(version))
        _write_history(client, name, alias, [*stack, _Entry(version, _time(), reason[:MAX_REASON_CHARS])])
        _clear_marks(client, model, version)
        return Move(name, version, previous, reason)


def rollback(name: str, store: str, *, alias: str = CHAMPION_ALIAS) -> Move:
    """Give the alias back to the version that was champion before; versions deleted since are passed over.

    The version that loses it is tagged `rolled_back`, so that the pipeline does not promote the same content again.

    Raises:
        ConfigurationError: no such registry or model, or nobody was champion before.
    """
    with _client(name, store) as client:
        model = _registered(client, name, store)
        current = _version_under(model, alias)
        stack = _history(model, alias, current)
        versions = _versions(client, name)
        before = [entry for entry in (stack if current is None else stack[:-1]) if entry.version in versions]
        while before and before[-1].version == current:  # of versions deleted in between
            before.pop()
        if not before:
            raise ConfigurationError(
                f"{name} has no {alias} before {'none' if current is None else f'version {current}'} to roll back to; "
                "`tetri models promote VERSION` chooses one"
            )
        target = before[-1].version
        reason = f"rollback from version {current}" if current is not None else "rollback"
        # history first: with the alias first, a crash in between would read as a move by somebody else
        _write_history(client, name, alias, before)
        client.set_registered_model_alias(name, alias, str(target))
        if current is not None:
            client.set_model_version_tag(name, str(current), ROLLED_BACK_TAG, f"{_time()}, to version {target}")
        _clear_marks(client, model, target)
        return Move(name, target, current, reason)


def set_challenger(name: str, version: int, store: str) -> None:
    """Point the challenger alias at a version.

    Raises:
        ConfigurationError: no such registry, model or version.
    """
    with _client(name, store) as client:
        versions = _versions(client, name)
        if version not in versions:
            raise ConfigurationError(_unknown_version(name, version, versions))
        client.set_registered_model_alias(name, CHALLENGER_ALIAS, str(version))


def history_tag(alias: str = CHAMPION_ALIAS) -> str:
    """Name of the registered model's tag that holds the alias's history."""
    return f"{alias}_history"


def _client(name: str, store: str) -> AbstractContextManager[MlflowClient]:
    return registry_client(store, f"model {name!r}")


def _find(client: MlflowClient, name: str) -> RegisteredModel | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _registered(client: MlflowClient, name: str, store: str) -> RegisteredModel:
    model = _find(client, name)
    if model is None:
        known = ", ".join(sorted(other.name for other in client.search_registered_models())) or "none"
        raise ConfigurationError(
            f"registry {store} has no model {name!r} (it has: {known}); run `dvc repro`, or give --name"
        )
    return model


def _versions(client: MlflowClient, name: str) -> list[int]:
    return sorted(int(version.version) for version in client.search_model_versions(f"name = '{name}'"))


def _unknown_version(name: str, version: int, versions: list[int]) -> str:
    known = ", ".join(map(str, versions[-10:])) or "none"
    return f"{name} has no version {version} (newest: {known}); `tetri models list` shows all"


def _version_under(model: RegisteredModel | None, alias: str) -> int | None:
    version = None if model is None else model.aliases.get(alias)
    return None if version is None else int(version)


def _clear_marks(client: MlflowClient, model: RegisteredModel, version: int) -> None:
    """A champion is neither challenger nor rolled back."""
    if _version_under(model, CHALLENGER_ALIAS) == version:
        client.delete_registered_model_alias(model.name, CHALLENGER_ALIAS)
    client.delete_model_version_tag(model.name, str(version), ROLLED_BACK_TAG)


def _history(model: RegisteredModel, alias: str, current: int | None) -> list[_Entry]:
    """The stack, with the current champion on top however it came there."""
    try:
        entries = json.loads(model.tags[history_tag(alias)])
        stack = [_Entry(int(entry["version"]), str(entry["at"]), str(entry["reason"])) for entry in entries]
    except (KeyError, TypeError, ValueError):  # none yet, or not ours
        stack = []
    if current is not None and (not stack or stack[-1].version != current):
        stack.append(_Entry(current, _time(), f"was {alias} before this history knew"))
    return stack


def _write_history(client: MlflowClient, name: str, alias: str, stack: list[_Entry]) -> None:
    client.set_registered_model_tag(name, history_tag(alias), json.dumps([asdict(e) for e in stack[-MAX_HISTORY:]]))


def _number(text: str | None) -> float:
    try:
        return float(text) if text is not None else math.nan
    except ValueError:
        return math.nan


def _time(seconds: float | None = None) -> str:
    """UTC, to the second, of a POSIX time or of now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
