"""`tetri`: argument parsing and calls, nothing else. A `TetriError` becomes one line on stderr and exit code 2."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from serving_plugin.cli import bench, models, predict, profile, serve
from serving_plugin.core.errors import TetriError

app = typer.Typer(
    name="tetri",
    help="Length-aware disaggregated serving on stock vLLM: train a length predictor (dvc repro), serve with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def configure(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, to standard error.")] = False,
) -> None:
    """Set up logging: handlers live here and nowhere else."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


for group in (serve, bench, profile, predict, models):
    group.register(app)


def main() -> None:
    """Entry point of the `tetri` command."""
    try:
        app()
    except TetriError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
