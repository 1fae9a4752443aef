"""Stage label: prompts with the length of their reply and its bucket `[0, G), [G, 2G), ...` (TetriInfer 3.3.2).

Reads `target.*`, `label.*`, data/prepared and data/generated; writes
data/labelled/{train,validation,calibration,test}.jsonl, report.json and target_replies.jsonl (the target's own replies,
whatever the splits are labelled with). Where the lengths come from (`label.source`):

  generated   the target's own replies, counted by the engine: what will be served
  recorded    the data set's replies, counted by the target's tokenizer: thousands of pairs, but of another model

A reply that was cut off at the limit, or a recorded one over `label.max_length_tokens`, is *censored*: its true length
is at least the number in the row.

    python -m pipeline.label
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.files import SPLITS, dataset_of, progress, read_json_lines, run_stage, write_json, write_json_lines
from pipeline.generate import GENERATED_FOLDER, REPLIES_FILE
from pipeline.params import LabelParams, Params, load_params
from pipeline.prepare import PREPARED_FOLDER
from pipeline.target import load_tokenizer
from serving_plugin.core.errors import ConfigurationError

LABELLED_FOLDER = Path("data/labelled")
TARGET_REPLIES_FILE = "target_replies.jsonl"
_COLUMNS = ("id", "root_id", "source", "prompt", "num_prompt_tokens", "output_tokens", "censored", "bucket")
_TYPES = {"id": "string", "root_id": "string", "prompt": "string", "split": "string"}


def num_buckets(max_length_tokens: int, granularity_tokens: int) -> int:
    """Buckets that hold the lengths 0 ... `max_length_tokens`."""
    return max_length_tokens // granularity_tokens + 1


def bucket_of(output_tokens: int, granularity_tokens: int, max_length_tokens: int) -> int:
    """Index of the bucket `[i * G, (i + 1) * G)`; lengths over the cap fall into the last one."""
    return min(output_tokens, max_length_tokens) // granularity_tokens


def count_tokens(tokenizer: Any) -> Callable[[Sequence[str]], list[int]]:
    """Token counts of plain texts: no `</s>` in front, as a reply's tokens have none."""

    def count(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    return count


def recorded_lengths(
    batch: Mapping[str, Sequence[Any]], count: Callable[[Sequence[str]], list[int]], cap_tokens: int
) -> dict[str, list[Any]]:
    """Prompt and reply lengths of a batch of prepared rows; a reply over the cap is censored at it."""
    lengths = count(batch["reply"])
    return {
        "num_prompt_tokens": count(batch["prompt"]),
        "output_tokens": [min(length, cap_tokens) for length in lengths],
        "censored": [length > cap_tokens for length in lengths],
    }


def generated_lengths(batch: Mapping[str, Sequence[Any]], cap_tokens: int) -> dict[str, list[Any]]:
    """Lengths of a batch of generated rows; one that stopped at a limit, the engine's or the cap, is censored."""
    lengths, reasons = batch["output_tokens"], batch["finish_reason"]
    return {
        "num_prompt_tokens": list(batch["prompt_tokens"]),
        "output_tokens": [min(length, cap_tokens) for length in lengths],
        "censored": [
            reason == "length" or length > cap_tokens for length, reason in zip(lengths, reasons, strict=True)
        ],
    }


def label(
    rows: Callable[[], Iterator[dict[str, Any]]],
    types: Mapping[str, str],
    lengths: Callable[[Mapping[str, Sequence[Any]]], dict[str, list[Any]]],
    params: LabelParams,
    folder: Path,
) -> dict[str, Any]:
    """Write the labelled splits; returns what the report says of them.

    Args:
        rows: id, root_id, split, prompt and whatever `lengths` reads.
        types: Arrow type of each column of `rows`.
        lengths: batch of rows -> num_prompt_tokens, output_tokens, censored.
    """

    def labelled(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        columns = lengths(batch)
        columns["bucket"] = [
            bucket_of(length, params.granularity_tokens, params.max_length_tokens)
            for length in columns["output_tokens"]
        ]
        columns["source"] = [params.source] * len(columns["bucket"])
        return columns

    with dataset_of(rows, types) as table:
        mapped = table.map(
            labelled, batched=True, batch_size=500, new_fingerprint="labelled", load_from_cache_file=False
        )
        splits = {}
        for name in SPLITS:
            kept = mapped.filter(
                lambda split, length, name=name: split == name and length > 0, input_columns=["split", "output_tokens"]
            )
            write_json_lines(folder / f"{name}.jsonl", ({key: row[key] for key in _COLUMNS} for row in kept))
            splits[name] = _describe(kept, params)
        reasons = mapped["finish_reason"] if "finish_reason" in types else ["stop"] * len(mapped)
        dropped = Counter(
            "prompt_too_long" if reason == "prompt_too_long" else "reply_without_a_token"
            for length, reason in zip(mapped["output_tokens"], reasons, strict=True)
            if length == 0
        )
    return {"splits": splits, "dropped": dict(sorted(dropped.items()))}


def _describe(rows: Any, params: LabelParams) -> dict[str, Any]:
    buckets = Counter(rows["bucket"])
    return {
        "num_rows": len(rows),
        "num_censored": sum(rows["censored"]),
        "rows_per_bucket": [
            buckets[i] for i in range(num_buckets(params.max_length_tokens, params.granularity_tokens))
        ],
        "modal_share": round(max(buckets.values()) / len(rows), 4) if len(rows) else None,
    }


def run(
    params: Params,
    prepared: Path = PREPARED_FOLDER,
    generated: Path = GENERATED_FOLDER,
    folder: Path = LABELLED_FOLDER,
) -> dict[str, Any]:
    """Run the stage.

    Raises:
        ConfigurationError: a split that has a share is left without rows.
    """
    settings = params.label
    if settings.source == "recorded":
        count = count_tokens(load_tokenizer(params.target.location))
        result = label(
            lambda: _recorded_rows(prepared),
            {**_TYPES, "reply": "string"},
            lambda batch: recorded_lengths(batch, count, settings.max_length_tokens),
            settings,
            folder,
        )
    else:
        result = label(
            lambda: _generated_rows(generated),
            {**_TYPES, "prompt_tokens": "int64", "output_tokens": "int64", "finish_reason": "string"},
            lambda batch: generated_lengths(batch, settings.max_length_tokens),
            settings,
            folder,
        )
    empty = [
        name
        for name, share in params.prepare.shares.as_dict().items()
        if share and not result["splits"][name]["num_rows"]
    ]
    if empty:
        raise ConfigurationError(
            f"no labelled row in {', '.join(empty)} (dropped: {result['dropped'] or 'none'}): raise "
            f"generate.num_prompts, prepare.max_prompts or generate.max_model_len"
        )
    report = {"source": settings.source, "granularity_tokens": settings.granularity_tokens, **result}
    write_json_lines(folder / TARGET_REPLIES_FILE, _target_replies(generated, settings))
    write_json(folder / "report.json", report)
    for name, split in result["splits"].items():
        counts = f"{split['num_rows']} rows, {split['num_censored']} censored"
        progress(f"label: {name} {counts}, by bucket {split['rows_per_bucket']}")
    return report


def _target_replies(generated: Path, params: LabelParams) -> Iterator[dict[str, Any]]:
    """Every reply of the target as a labelled row, whatever the training labels are: what serving will really see."""
    for row in _generated_rows(generated):
        if row["output_tokens"] > 0:
            columns = generated_lengths({key: [value] for key, value in row.items()}, params.max_length_tokens)
            plain = {key: values[0] for key, values in columns.items()} | {"source": "generated"}
            bucket = bucket_of(plain["output_tokens"], params.granularity_tokens, params.max_length_tokens)
            yield {key: (row | plain | {"bucket": bucket})[key] for key in _COLUMNS}


def _recorded_rows(prepared: Path) -> Iterator[dict[str, Any]]:
    for split in SPLITS:
        for row in read_json_lines(prepared / f"{split}.jsonl", "prepare"):
            yield {key: row[key] for key in ("id", "root_id", "prompt", "reply")} | {"split": split}


def _generated_rows(generated: Path) -> Iterator[dict[str, Any]]:
    """Replies; a prompt that the context could not hold has none, and its row has zero tokens."""
    for row in read_json_lines(generated / REPLIES_FILE, "generate"):
        yield {key: row[key] for key in (*_TYPES, "prompt_tokens", "output_tokens", "finish_reason")}


def main() -> None:
    """Entry point."""
    run(load_params())


if __name__ == "__main__":
    run_stage(main)
