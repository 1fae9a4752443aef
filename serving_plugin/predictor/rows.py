"""Labelled rows: what the pipeline's label stage writes and training and evaluation read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from serving_plugin.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One prompt and the length of its reply in the target's tokens (a lower bound when `censored`)."""

    id: str
    root_id: str
    source: str
    prompt: str
    output_tokens: int
    censored: bool


def read_rows(path: Path) -> list[LabelledRow]:
    """Rows of a labelled JSONL file.

    Raises:
        ConfigurationError: no such file, no rows, or a line that is not such a row (its number is named).
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 inside a prompt
    except OSError as error:
        raise ConfigurationError(
            f"labelled data {path} cannot be read ({error.strerror}); run `dvc repro label`"
        ) from None
    rows = [_parse_row(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigurationError(f"{path} holds no rows; run `dvc repro label` with more prompts")
    return rows


def _parse_row(line: str, path: Path, number: int) -> LabelledRow:
    try:
        content = json.loads(line)
        row = LabelledRow(
            id=str(content["id"]),
            root_id=str(content["root_id"]),
            source=str(content["source"]),
            prompt=str(content["prompt"]),
            output_tokens=int(content["output_tokens"]),
            censored=bool(content["censored"]),
        )
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path}:{number}: not a labelled row ({error}); run `dvc repro label`") from None
    except KeyError as error:
        raise ConfigurationError(f"{path}:{number}: the row lacks {error}; run `dvc repro label`") from None
    if row.output_tokens < 0:
        raise ConfigurationError(
            f"{path}:{number}: output_tokens {row.output_tokens} is negative; run `dvc repro label`"
        )
    return row
