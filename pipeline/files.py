"""What every stage needs around its work: atomic files, JSON lines, one-line errors, progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from serving_plugin.core.errors import ConfigurationError, TetriError

SPLITS = ("train", "validation", "calibration", "test")


def write_text(path: Path, text: str) -> None:
    """Write the whole file or none of it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write the whole file or none of it (temporary file in the same folder, then rename)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a newline at the end, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One object a line, atomically; `rows` may be a stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def read_json_lines(path: Path, made_by: str) -> Iterator[dict[str, Any]]:
    """Rows of a stage's output.

    Raises:
        ConfigurationError: the file is missing or has a damaged line; names the stage that makes it.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing: run `dvc repro {made_by}` first")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _parse_row(line, f"{path}:{number}", made_by)


def _parse_row(line: bytes, place: str, made_by: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
        if not isinstance(row, dict):
            raise ValueError(f"a {type(row).__name__}, needs an object")
    except ValueError as error:  # not UTF-8, or no JSON
        # deleted, since `generate` carries on from what is there
        raise ConfigurationError(
            f"{place}: damaged line ({error}); delete the file and run `dvc repro {made_by}`"
        ) from None
    return row


def progress(message: str) -> None:
    """One line of progress, shown at once also when DVC or make captures the output."""
    print(message, flush=True)


def run_stage(main: Callable[[], None]) -> None:
    """Run a stage's entry point; a TetriError becomes one line and exit code 2, without a traceback."""
    # OpenMP reads it when torch loads. Threads that spin at barriers cost 3-4 times the CPU when the cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        main()
    except TetriError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
