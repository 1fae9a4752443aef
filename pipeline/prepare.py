"""Stage prepare: clean first turns of ShareGPT, split by root conversation.

Reads `prepare.*` and `seed`; writes data/prepared/{train,validation,calibration,test}.jsonl and report.json, in which
every row of the source is either kept or counted under the reason why not.

    python -m pipeline.prepare
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import SPLITS, dataset_of, progress, run_stage, write_json, write_json_lines
from pipeline.params import PrepareParams, load_params
from serving_plugin.bench.sharegpt import Conversation, FirstPair, ReadReport, first_pairs, read_conversations
from serving_plugin.core.errors import ConfigurationError

if TYPE_CHECKING:
    from datasets import Dataset

PREPARED_FOLDER = Path("data/prepared")
_NOT_A_WORD = re.compile(r"[\W_]+")


def split_of(root_id: str, seed: int, shares: Mapping[str, float]) -> str:
    """The split of a root conversation: a hash into the unit interval, cut by `shares` in their order.

    Depends on nothing but its arguments, so a row keeps its split when the source grows.
    """
    digest = hashlib.sha256(f"{seed}\x00{root_id}".encode()).digest()
    point, reached = int.from_bytes(digest[:8]) / 2**64, 0.0
    for name, share in shares.items():
        reached += share
        if point < reached:
            return name
    return [name for name, share in shares.items() if share > 0][-1]  # shares that sum to a hair under one


def near_duplicate_key(prompt: str, num_chars: int) -> str:
    """The first `num_chars` letters and digits of a prompt: equal for two fillings of one template."""
    plain = _NOT_A_WORD.sub("", unicodedata.normalize("NFKC", prompt).casefold())
    return plain[:num_chars]


def clean_pairs(pairs: Iterable[FirstPair], params: PrepareParams, report: ReadReport) -> Iterator[FirstPair]:
    """Pairs within the length limits, one for each distinct prompt, at most `max_prompts`; the others are counted."""
    seen: set[bytes] = set()
    num_kept = 0
    for pair in pairs:
        if params.max_prompts is not None and num_kept == params.max_prompts:
            report.dropped["over_max_prompts"] += 1
            continue
        digest = hashlib.sha256(" ".join(pair.prompt.split()).casefold().encode()).digest()
        if len(pair.prompt) < params.min_prompt_chars:
            report.dropped["prompt_too_short"] += 1
        elif len(pair.prompt) > params.max_prompt_chars:
            report.dropped["prompt_too_long"] += 1
        elif digest in seen:
            report.dropped["same_prompt_as_an_earlier_row"] += 1
        else:
            seen.add(digest)
            num_kept += 1
            yield pair


def split_rows(rows: Iterable[Mapping[str, Any]], params: PrepareParams, seed: int) -> Iterator[tuple[str, bool]]:
    """(split, moved) of each row.

    A near-duplicate of an earlier prompt goes where that one went (moved), so that a template learned in training is
    not met again in the test.
    """
    shares = params.shares.as_dict()
    split_of_key: dict[str, str] = {}
    for row in rows:
        own = split_of(row["root_id"], seed, shares)
        key = near_duplicate_key(row["prompt"], params.near_duplicate_chars)
        split = split_of_key.setdefault(key, own) if len(key) == params.near_duplicate_chars else own
        yield split, split != own


def prepare(params: PrepareParams, seed: int, folder: Path = PREPARED_FOLDER) -> dict[str, Any]:
    """Run the stage; returns the report.

    Raises:
        ConfigurationError: the source cannot be read, or a split that has a share is empty.
    """
    report = ReadReport()
    progress(f"prepare: reading {params.source}")

    def rows() -> Iterator[dict[str, str]]:
        conversations = _with_progress(read_conversations(params.source, report))
        for pair in clean_pairs(first_pairs(conversations, report), params, report):
            yield asdict(pair)

    with dataset_of(rows, dict.fromkeys(("id", "root_id", "prompt", "reply"), "string")) as pairs:
        placed = list(split_rows(pairs, params, seed))
        pairs = pairs.add_column("split", [split for split, _ in placed])
        counts = {name: _write_split(pairs, name, folder) for name in SPLITS}
    empty = [name for name, share in params.shares.as_dict().items() if share > 0 and counts[name] == 0]
    if empty:
        raise ConfigurationError(
            f"no prompt fell into {', '.join(empty)} ({sum(counts.values())} prompts in all): raise "
            f"prepare.max_prompts or widen prepare.min_prompt_chars and prepare.max_prompt_chars"
        )
    result = {
        **report.to_json(),
        "num_prompts": sum(counts.values()),
        "splits": counts,
        "num_moved_to_the_split_of_a_near_duplicate": sum(moved for _, moved in placed),
    }
    write_json(folder / "report.json", result)
    _say(result)
    return result


def _write_split(pairs: Dataset, name: str, folder: Path) -> int:
    chosen = pairs.filter(lambda split: split == name, input_columns="split")
    write_json_lines(folder / f"{name}.jsonl", (dict(row) for row in chosen))
    return len(chosen)


def _with_progress(conversations: Iterable[Conversation], every: int = 5000) -> Iterator[Conversation]:
    for number, conversation in enumerate(conversations, start=1):
        if number % every == 0:
            progress(f"prepare: {number} conversations read")
        yield conversation


def _say(result: Mapping[str, Any]) -> None:
    dropped = ", ".join(f"{reason} {count}" for reason, count in result["dropped"].items())
    splits = ", ".join(f"{name} {count}" for name, count in result["splits"].items())
    progress(f"prepare: {result['num_conversations']} whole conversations, dropped: {dropped or 'none'}")
    if result["truncated_at_byte"] is not None:
        progress(
            f"prepare: the source is cut off: its last {result['num_truncated_bytes']} bytes, from byte "
            f"{result['truncated_at_byte']}, are no whole conversation"
        )
    progress(f"prepare: {result['num_prompts']} prompts: {splits}")


def main() -> None:
    """Entry point."""
    params = load_params()
    prepare(params.prepare, params.seed)


if __name__ == "__main__":
    run_stage(main)
