"""Stage label: conversations with the lengths of their replies in the target's tokens (TetriInfer 3.3.2).

Reads `target.*`, `label.*`, data/prepared and data/generated; writes
data/labelled/{train,validation,calibration,test}.jsonl in the form of `serving_plugin.predictor.rows`, report.json, and
the target's own replies whatever the splits are labelled with: target_replies.jsonl to conversations of the test split,
target_calibration.jsonl to those of the calibration split. `label.source`:

  generated   the target's own replies, counted by the engine: what will be served
  recorded    the data set's replies, counted by the target's tokenizer: tens of thousands, but of another model

A reply that was cut off at the limit, or a recorded one over `label.max_length_tokens`, is *censored*: its true length
is at least the number in the row.

    python -m pipeline.label
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.files import SPLITS, progress, read_json_lines, run_stage, write_json, write_json_lines
from pipeline.generate import GENERATED_FOLDER, REPLIES_FILE
from pipeline.params import LabelParams, Params, load_params
from pipeline.prepare import PREPARED_FOLDER
from pipeline.target import load_tokenizer
from serving_plugin.core.errors import ConfigurationError

LABELLED_FOLDER = Path("data/labelled")
TARGET_REPLIES_FILE = "target_replies.jsonl"
TARGET_CALIBRATION_FILE = "target_calibration.jsonl"
_BATCH_TEXTS = 1000

Count = Callable[[Sequence[str]], list[int]]


@dataclass(slots=True)
class _Tally:
    """What one labelled file holds."""

    num_rows: int = 0
    num_censored: int = 0
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, replies: Sequence[Mapping[str, Any]], params: LabelParams) -> None:
        for reply in replies:
            self.num_rows += 1
            self.num_censored += bool(reply["censored"])
            self.buckets[bucket_of(reply["output_tokens"], params.granularity_tokens, params.max_length_tokens)] += 1

    def describe(self, params: LabelParams) -> dict[str, Any]:
        count = num_buckets(params.max_length_tokens, params.granularity_tokens)
        return {
            "num_rows": self.num_rows,
            "num_censored": self.num_censored,
            "rows_per_bucket": [self.buckets[i] for i in range(count)],
            "modal_share": round(max(self.buckets.values()) / self.num_rows, 4) if self.num_rows else None,
        }


def num_buckets(max_length_tokens: int, granularity_tokens: int) -> int:
    """Buckets that hold the lengths 0 ... `max_length_tokens`."""
    return max_length_tokens // granularity_tokens + 1


def bucket_of(output_tokens: int, granularity_tokens: int, max_length_tokens: int) -> int:
    """Index of the bucket `[i * G, (i + 1) * G)`; lengths over the cap fall into the last one."""
    return min(output_tokens, max_length_tokens) // granularity_tokens


def count_tokens(tokenizer: Any) -> Count:
    """Token counts of plain texts: no `</s>` in front, as a reply's tokens have none; control tokens stay text."""

    def count(texts: Sequence[str]) -> list[int]:
        encoded = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)
        return [len(ids) for ids in encoded["input_ids"]]

    return count


def censored_at(output_tokens: int, was_cut: bool, cap_tokens: int) -> dict[str, Any]:
    """A reply's length and whether it is only a lower bound: it was cut, or is over the cap."""
    return {"output_tokens": min(output_tokens, cap_tokens), "censored": was_cut or output_tokens > cap_tokens}


def recorded_replies(rows: Iterator[dict[str, Any]], count: Count, cap_tokens: int) -> Iterator[dict[str, Any]]:
    """Prepared conversations -> labelled ones, counted in batches of whole conversations."""
    held: list[dict[str, Any]] = []
    num_texts = 0
    for row in rows:
        held.append(row)
        num_texts += len(row["replies"])
        if num_texts >= _BATCH_TEXTS:
            yield from _count_replies(held, count, cap_tokens)
            held, num_texts = [], 0
    yield from _count_replies(held, count, cap_tokens)


def _count_replies(rows: Sequence[dict[str, Any]], count: Count, cap_tokens: int) -> Iterator[dict[str, Any]]:
    texts = [row["messages"][turn]["content"] for row in rows for turn in row["replies"]]
    lengths = iter(count(texts) if texts else [])
    for row in rows:
        replies = [{"turn": turn, **censored_at(next(lengths), False, cap_tokens)} for turn in row["replies"]]
        yield _labelled(row["root_id"], "recorded", row["messages"], replies)


def generated_replies(
    messages_of: Mapping[str, Sequence[Mapping[str, str]]], rows: Iterator[dict[str, Any]], cap_tokens: int
) -> Iterator[dict[str, Any]]:
    """The target's replies, gathered by conversation; one that stopped at a limit is censored.

    Args:
        messages_of: root id -> messages of the prepared conversation.
    """
    by_root: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_root.setdefault(row["root_id"], []).append(row)
    for root_id, replies in by_root.items():
        labelled = [
            {"turn": reply["turn"]}
            | censored_at(reply["output_tokens"], reply["finish_reason"] == "length", cap_tokens)
            for reply in sorted(replies, key=lambda reply: (reply["turn"], reply["sample"]))
        ]
        yield _labelled(root_id, "generated", messages_of[root_id], labelled)


def _labelled(root_id: str, source: str, messages: Sequence[Any], replies: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of a labelled file; messages after the last reply's question are left out."""
    last = max((reply["turn"] for reply in replies), default=0)
    return {"root_id": root_id, "source": source, "messages": list(messages[:last]), "replies": replies}


def run(
    params: Params,
    prepared: Path = PREPARED_FOLDER,
    generated: Path = GENERATED_FOLDER,
    folder: Path = LABELLED_FOLDER,
) -> dict[str, Any]:
    """Run the stage; a refusal leaves `folder` as it was.

    Raises:
        ConfigurationError: a split that has a share is left without rows.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        report = _write_all(params, prepared, generated, Path(scratch))
        folder.mkdir(exist_ok=True)
        for path in Path(scratch).iterdir():
            path.replace(folder / path.name)
    return report


def _write_all(params: Params, prepared: Path, generated: Path, folder: Path) -> dict[str, Any]:
    """All files of the stage into an empty folder."""
    settings, dropped = params.label, Counter[str]()
    count = count_tokens(load_tokenizer(params.target.location)) if settings.source == "recorded" else None
    splits = {}
    for name in SPLITS:
        prepared_rows = read_json_lines(prepared / f"{name}.jsonl", "prepare")
        if count is not None:
            lines = recorded_replies(prepared_rows, count, settings.max_length_tokens)
        else:
            messages_of = {row["root_id"]: row["messages"] for row in prepared_rows}
            lines = generated_replies(messages_of, _generated_rows(generated, name), settings.max_length_tokens)
        splits[name] = _write(folder / f"{name}.jsonl", lines, settings, dropped).describe(settings)
        progress(
            f"label: {name} {splits[name]['num_rows']} rows, {splits[name]['num_censored']} censored, "
            f"by bucket {splits[name]['rows_per_bucket']}"
        )
    empty = [name for name, share in params.prepare.shares.as_dict().items() if share and not splits[name]["num_rows"]]
    if empty:
        raise ConfigurationError(
            f"no labelled row in {', '.join(empty)} (dropped: {dict(dropped) or 'none'}): raise "
            f"generate.num_prompts, prepare.max_conversations or generate.max_model_len"
        )
    target = _write_target_replies(prepared, generated, "test", folder / TARGET_REPLIES_FILE, settings)
    _write_target_replies(prepared, generated, "calibration", folder / TARGET_CALIBRATION_FILE, settings)
    report = {
        "source": settings.source,
        "granularity_tokens": settings.granularity_tokens,
        "splits": splits,
        "dropped": dict(sorted(dropped.items())),
        "target_replies": target,
    }
    write_json(folder / "report.json", report)
    return report


def _write(path: Path, lines: Iterator[dict[str, Any]], params: LabelParams, dropped: Counter[str]) -> _Tally:
    """Write the lines that have a reply of at least one token; the others are counted in `dropped`."""
    tally = _Tally()

    def kept() -> Iterator[dict[str, Any]]:
        for line in lines:
            replies = [reply for reply in line["replies"] if reply["output_tokens"] > 0]
            dropped["reply_without_a_token"] += len(line["replies"]) - len(replies)
            if replies:
                tally.add(replies, params)
                yield {**line, "replies": replies}

    write_json_lines(path, kept())
    return tally


def _write_target_replies(
    prepared: Path, generated: Path, split: str, path: Path, params: LabelParams
) -> dict[str, Any]:
    """Every reply of the target to a conversation of this split, whatever the splits are labelled with."""
    messages_of = {row["root_id"]: row["messages"] for row in read_json_lines(prepared / f"{split}.jsonl", "prepare")}
    rows = generated_replies(messages_of, _generated_rows(generated, split), params.max_length_tokens)
    return _write(path, rows, params, Counter()).describe(params)


def _generated_rows(generated: Path, split: str) -> Iterator[dict[str, Any]]:
    """The target's replies of a split; a conversation that its context could not hold has none: zero tokens."""
    for row in read_json_lines(generated / REPLIES_FILE, "generate"):
        if row["split"] == split:
            yield row


def main() -> None:
    """Entry point."""
    run(load_params())


if __name__ == "__main__":
    run_stage(main)
