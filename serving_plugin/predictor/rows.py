"""Labelled rows: what the pipeline's label stage writes and training and evaluation read.

A file has one conversation a line, with every reply that has a length:

    {"root_id", "source", "messages": [{"role", "content"}, ...],
     "replies": [{"turn": index of the reply in messages, "output_tokens", "censored"}, ...]}

Several samples of one reply are several entries with the same `turn`. A line for a single prompt may be shorter:
{"id", "prompt", "output_tokens"}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import Message, messages_of

MAX_OUTPUT_TOKENS = 10_000_000  # beyond it a file is damaged, or no longer in tokens


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """A conversation so far and the length of the reply in the target's tokens (a lower bound when `censored`).

    `id` is `<root_id>:<turn>`, the same for several samples of one reply. `messages` end with the one answered.
    """

    id: str
    root_id: str
    source: str
    messages: tuple[Message, ...]
    output_tokens: int
    censored: bool

    @property
    def num_earlier_replies(self) -> int:
        """How often the assistant has spoken before: 0 in a first turn."""
        return sum(message.role == "assistant" for message in self.messages[:-1])

    @property
    def prompt(self) -> str:
        """Text of the message that is answered."""
        return self.messages[-1].content


def read_rows(path: Path) -> list[LabelledRow]:
    """Rows of a labelled JSONL file, in file order.

    Raises:
        ConfigurationError: no such file, no rows, or a line that is not such a row (its number is named).
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 inside a prompt
    except OSError as error:
        raise ConfigurationError(
            f"labelled data {path} cannot be read ({error.strerror}); run `dvc repro label`"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"labelled data {path} is no UTF-8 text ({error}); run `dvc repro label`") from None
    rows = [row for number, line in enumerate(lines, start=1) if line.strip() for row in _parse(line, path, number)]
    if not rows:
        raise ConfigurationError(f"{path} holds no rows; run `dvc repro label` with more conversations")
    return rows


def _parse(line: str, path: Path, number: int) -> Iterator[LabelledRow]:
    try:
        content = json.loads(line)
        rows = list(_single_prompt(content) if "prompt" in content else _conversation(content))
    except KeyError as error:
        raise ConfigurationError(f"{path}:{number}: the row lacks {error}; run `dvc repro label`") from None
    except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        # int(Infinity) overflows, and JSON may be nested too deeply
        raise ConfigurationError(f"{path}:{number}: not a labelled row ({error}); run `dvc repro label`") from None
    for row in rows:
        if not 0 <= row.output_tokens <= MAX_OUTPUT_TOKENS:
            raise ConfigurationError(
                f"{path}:{number}: output_tokens {row.output_tokens} is not from 0 to {MAX_OUTPUT_TOKENS}; "
                f"run `dvc repro label`"
            )
        yield row


def _conversation(content: Mapping[str, Any]) -> Iterator[LabelledRow]:
    root_id, messages = str(content["root_id"]), messages_of(content["messages"])
    for reply in content["replies"]:
        turn = int(reply["turn"])
        if not 0 < turn <= len(messages):
            raise ValueError(f"turn {turn} is outside the {len(messages)} messages")
        yield LabelledRow(
            id=f"{root_id}:{turn}",
            root_id=root_id,
            source=str(content["source"]),
            messages=messages[:turn],
            output_tokens=int(reply["output_tokens"]),
            censored=_truth(reply["censored"]),
        )


def _single_prompt(content: Mapping[str, Any]) -> Iterator[LabelledRow]:
    row_id = str(content["id"])
    yield LabelledRow(
        id=row_id,
        root_id=str(content.get("root_id", row_id)),
        source=str(content.get("source", "given")),
        messages=(Message("user", str(content["prompt"])),),
        output_tokens=int(content["output_tokens"]),
        censored=_truth(content.get("censored", False)),
    )


def _truth(value: object) -> bool:
    if not isinstance(value, bool):  # "false" would be true
        raise ValueError(f"censored is {value!r}, expected true or false")
    return value
