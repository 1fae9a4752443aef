"""`tetri models`: the registered versions of the length predictor, and which one serving loads."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving_plugin.cli.predict import JsonOption, TrackingOption
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.registry import DEFAULT_MODEL_NAME, default_tracking_uri

if TYPE_CHECKING:
    from serving_plugin.predictor.lifecycle import ModelVersionInfo, Move

NameOption = Annotated[str, typer.Option("--name", help="Registered model.")]


def register(app: typer.Typer) -> None:
    """Add the command group to `app`."""
    group = typer.Typer(no_args_is_help=True, help="Registered predictors: which there are, and which is champion.")
    group.command("list")(list_models)
    group.command("promote")(promote)
    group.command("rollback")(rollback)
    app.add_typer(group, name="models")


def list_models(
    name: NameOption = DEFAULT_MODEL_NAME, tracking_uri: TrackingOption = None, as_json: JsonOption = False
) -> None:
    """Show all versions, newest first, with their scores and what the gate said.

    Examples:  tetri models list  |  tetri models list --json
    """
    from serving_plugin.predictor.lifecycle import list_versions

    versions = list_versions(name, tracking_uri or default_tracking_uri())
    if as_json:
        typer.echo(json.dumps([_to_plain(info) for info in versions], indent=2, ensure_ascii=False))
        return
    _print_versions(name, versions)


def promote(
    version: Annotated[int, typer.Argument(min=1, help="Version to make champion.", show_default=False)],
    name: NameOption = DEFAULT_MODEL_NAME,
    force: Annotated[bool, typer.Option("--force", help="Also a version that the gate found worse.")] = False,
    reason: Annotated[str, typer.Option(help="One line for the history.")] = "tetri models promote",
    tracking_uri: TrackingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a version champion: what serving loads from its next start on.

    Examples:  tetri models promote 3  |  tetri models promote 2 --force --reason "better on long prompts"
    """
    from serving_plugin.predictor import lifecycle

    store = tracking_uri or default_tracking_uri()
    verdict = next((v.verdict for v in lifecycle.list_versions(name, store) if v.version == version), None)
    if verdict is not None and verdict.is_worse and not verdict.is_champion and not force:
        why = "; ".join(verdict.reasons) or "no reason was recorded"
        raise ConfigurationError(
            f"version {version} of {name} was found worse ({why}); --force promotes it all the same"
        )
    _print_move(lifecycle.promote(name, version, store, reason), as_json)


def rollback(
    name: NameOption = DEFAULT_MODEL_NAME, tracking_uri: TrackingOption = None, as_json: JsonOption = False
) -> None:
    """Give the alias back to the version that was champion before; once more goes further back.

    Examples:  tetri models rollback  |  tetri models rollback --json
    """
    from serving_plugin.predictor import lifecycle

    _print_move(lifecycle.rollback(name, tracking_uri or default_tracking_uri()), as_json)


def _to_plain(info: ModelVersionInfo) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(info).items()
    }


def _print_move(move: Move, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(move), ensure_ascii=False))
        return
    before = "nobody was champion before" if move.previous is None else f"version {move.previous} was champion before"
    typer.echo(f"{move.name}: version {move.version} is champion; {before}. Running servers keep what they loaded.")


def _print_versions(name: str, versions: list[ModelVersionInfo]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}: {len(versions)} version{'' if len(versions) == 1 else 's'}")
    for column in ("version", "alias", "target", "accuracy", "modal", "created", "verdict"):
        right = column in ("version", "accuracy", "modal")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for info in versions:
        at = f" at {info.granularity_tokens}" if info.granularity_tokens else ""
        table.add_row(
            str(info.version),
            ", ".join(info.aliases),
            info.target_model,
            "" if math.isnan(info.accuracy) else f"{info.accuracy:.3f}{at}",
            "" if math.isnan(info.modal_accuracy) else f"{info.modal_accuracy:.3f}",
            info.created[:16].replace("T", " "),
            _verdict(info),
        )
    Console(file=sys.stdout, markup=False).print(table)


def _verdict(info: ModelVersionInfo, limit: int = 120) -> str:
    if info.rolled_back:
        return f"rolled back {info.rolled_back}"
    if info.verdict is None:
        return "none recorded"
    first, *others = info.verdict.reasons or ("",)
    outcome = "passed" if info.verdict.is_champion else "worse" if info.verdict.is_worse else "undecided"
    text = f"{outcome}{': ' if first else ''}{first}"
    text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return f"{text} (+{len(others)} more)" if others else text
