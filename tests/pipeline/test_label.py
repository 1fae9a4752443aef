"""Label: counts without `</s>`, buckets at every granularity, censored replies, several samples, clear errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.files import SPLITS, write_json_lines
from pipeline.label import (
    bucket_of,
    censored_at,
    count_tokens,
    generated_replies,
    num_buckets,
    recorded_replies,
    run,
)
from pipeline.params import Params, load_profile
from pipeline.target import TINY_OPT, load_tokenizer, make_target
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.rows import read_rows


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(TINY_OPT, tmp_path_factory.mktemp("target") / "tiny-opt")


def params_for(target: Path, **label: Any) -> Params:
    params = load_profile("ci")
    return dataclasses.replace(
        params,
        target=dataclasses.replace(params.target, path=str(target)),
        label=dataclasses.replace(params.label, **label),
    )


def chat(root_id: str, *texts: str, replies: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """A prepared conversation; texts alternate and begin with the user's."""
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    return {"root_id": root_id, "messages": messages, "replies": list(replies)}


def write_prepared(folder: Path, num_rows: int = 3) -> None:
    for split in SPLITS:
        rows = [chat(f"{split}{i}", f"ask {i}", "word " * (i * 100 + 1)) for i in range(num_rows)]
        write_json_lines(folder / f"{split}.jsonl", rows)


def reply_row(
    root_id: str, output_tokens: int, finish_reason: str = "stop", turn: int = 1, sample: int = 0
) -> dict[str, Any]:
    return {
        "id": f"{root_id}:{turn}",
        "root_id": root_id,
        "split": root_id.rstrip("0123456789"),
        "turn": turn,
        "sample": sample,
        "prompt_sha256": "",
        "prompt_tokens": 4,
        "output_tokens": output_tokens,
        "finish_reason": finish_reason,
        "text": "",
    }


@pytest.mark.parametrize("granularity", [100, 200, 400])
@pytest.mark.parametrize("cap", [256, 1024])
def test_buckets_are_half_open_and_the_last_one_holds_the_cap(granularity: int, cap: int) -> None:
    assert bucket_of(0, granularity, cap) == 0
    assert bucket_of(granularity - 1, granularity, cap) == 0
    if granularity <= cap:
        assert bucket_of(granularity, granularity, cap) == 1
    assert (
        bucket_of(cap, granularity, cap) == bucket_of(10 * cap, granularity, cap) == num_buckets(cap, granularity) - 1
    )


@given(length=st.integers(0, 5000), granularity=st.sampled_from([50, 100, 200, 400]), cap=st.integers(1, 4096))
def test_every_length_below_the_cap_lies_inside_its_bucket(length: int, granularity: int, cap: int) -> None:
    index = bucket_of(length, granularity, cap)
    assert 0 <= index < num_buckets(cap, granularity)
    if length <= cap:
        assert index * granularity <= length < (index + 1) * granularity


def test_counts_leave_out_the_token_in_front(target: Path) -> None:
    tokenizer: Any = load_tokenizer(str(target))
    assert count_tokens(tokenizer)(["a computer", ""]) == [len(tokenizer("a computer")["input_ids"]) - 1, 0]


def test_control_tokens_that_a_reply_spells_out_are_counted_as_text(target: Path) -> None:
    tokenizer: Any = load_tokenizer(str(target))
    assert count_tokens(tokenizer)(["the </s> token"])[0] > len(tokenizer("the </s> token")["input_ids"])


@pytest.mark.parametrize(
    ("output_tokens", "was_cut", "expected"),
    [(8, True, (8, True)), (8, False, (8, False)), (16, False, (16, False)), (20, False, (16, True))],
)
def test_a_reply_at_the_limit_is_censored_and_one_that_ended_there_is_not(
    output_tokens: int, was_cut: bool, expected: tuple[int, bool]
) -> None:
    found = censored_at(output_tokens, was_cut, 16)
    assert (found["output_tokens"], found["censored"]) == expected


def test_recorded_replies_of_many_conversations_keep_their_places() -> None:
    rows = [chat(f"r{i}", "ask", "x" * i, "more", "y" * (2 * i), replies=(1, 3)) for i in range(1, 700)]
    lines = list(recorded_replies(iter(rows), lambda texts: [len(text) for text in texts], 1000))
    assert [line["root_id"] for line in lines] == [row["root_id"] for row in rows]
    for i, line in enumerate(lines, start=1):
        assert [(r["turn"], r["output_tokens"]) for r in line["replies"]] == [(1, i), (3, min(2 * i, 1000))]
        assert [r["censored"] for r in line["replies"]] == [False, 2 * i > 1000]
        assert [message["content"] for message in line["messages"]] == ["ask", "x" * i, "more"]


def test_a_generated_reply_at_the_token_limit_is_a_bound_and_no_length() -> None:
    rows = [reply_row("a", 8, "length"), reply_row("a", 8, "stop", sample=1), reply_row("a", 20, "stop", turn=3)]
    messages = {"a": chat("a", "ask", "one", "more", "two")["messages"]}
    (line,) = generated_replies(messages, iter(rows), 16)
    assert line["replies"] == [
        {"turn": 1, "output_tokens": 8, "censored": True},
        {"turn": 1, "output_tokens": 8, "censored": False},
        {"turn": 3, "output_tokens": 16, "censored": True},
    ]
    assert line["messages"] == messages["a"][:3]


def test_recorded_labels_are_rows_that_training_reads(tmp_path: Path, target: Path) -> None:
    write_prepared(tmp_path / "prepared")
    write_json_lines(tmp_path / "generated/replies.jsonl", [])
    params = params_for(target, max_length_tokens=300, granularity_tokens=100)
    report = run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    count = count_tokens(load_tokenizer(str(target)))
    for split in SPLITS:
        rows = read_rows(tmp_path / "labelled" / f"{split}.jsonl")
        assert [row.id for row in rows] == [f"{split}{i}:1" for i in range(3)]
        assert [row.prompt for row in rows] == [f"ask {i}" for i in range(3)]
        lengths = count(["word " * (i * 100 + 1) for i in range(3)])
        assert [row.output_tokens for row in rows] == [min(300, length) for length in lengths]
        assert [row.censored for row in rows] == [length > 300 for length in lengths]
        assert {row.source for row in rows} == {"recorded"}
        assert sum(report["splits"][split]["rows_per_bucket"]) == 3
    assert (tmp_path / "labelled/target_replies.jsonl").read_text() == ""


def test_generated_labels_and_what_they_leave_out(tmp_path: Path, target: Path) -> None:
    write_prepared(tmp_path / "prepared", 10)
    rows = [reply_row(f"{split}{i}", 10 * i + 5) for split in SPLITS for i in range(2)]
    rows += [reply_row("train1", 25, sample=1), reply_row("train7", 48, "length")]
    rows += [reply_row("train8", 0, "prompt_too_long"), reply_row("test9", 0)]
    write_json_lines(tmp_path / "generated/replies.jsonl", rows)
    params = params_for(target, source="generated", max_length_tokens=48, granularity_tokens=100)
    report = run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    train = read_rows(tmp_path / "labelled/train.jsonl")
    assert [(row.id, row.output_tokens, row.censored) for row in train] == [
        ("train0:1", 5, False),
        ("train1:1", 15, False),
        ("train1:1", 25, False),
        ("train7:1", 48, True),
    ]
    assert sum(report["dropped"].values()) == 2
    assert report["splits"]["train"]["num_rows"] == 4
    assert report["splits"]["train"]["num_censored"] == 1


def test_recorded_labels_keep_the_targets_replies_beside_them(tmp_path: Path, target: Path) -> None:
    write_prepared(tmp_path / "prepared")
    write_json_lines(tmp_path / "generated/replies.jsonl", [reply_row("test1", 48, "length")])
    params = params_for(target)
    run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    replies = read_rows(tmp_path / "labelled/target_replies.jsonl")
    assert [(row.source, row.output_tokens, row.censored) for row in replies] == [("generated", 48, True)]
    assert replies[0].prompt == "ask 1"


def test_a_split_without_rows_and_missing_input_name_the_cure(tmp_path: Path, target: Path) -> None:
    params = params_for(target, source="generated")
    with pytest.raises(ConfigurationError, match="dvc repro prepare"):
        run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    write_prepared(tmp_path / "prepared")
    with pytest.raises(ConfigurationError, match="dvc repro generate"):
        run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    write_json_lines(tmp_path / "generated/replies.jsonl", [reply_row("train0", 5)])
    with pytest.raises(ConfigurationError, match=r"no labelled row in validation, calibration, test .*raise generate"):
        run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    assert {path.name for path in tmp_path.iterdir()} == {"prepared", "generated"}


def test_a_refusal_leaves_the_old_files(tmp_path: Path, target: Path) -> None:
    def label() -> dict[str, bytes]:
        run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
        return contents()

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "labelled").iterdir()}

    params = params_for(target, source="generated")
    write_prepared(tmp_path / "prepared")
    write_json_lines(tmp_path / "generated/replies.jsonl", [reply_row(f"{split}0", 5) for split in SPLITS])
    before = label()
    assert len(before) == len(SPLITS) + 3
    write_json_lines(tmp_path / "generated/replies.jsonl", [reply_row("train0", 6)])
    with pytest.raises(ConfigurationError, match="no labelled row"):
        label()
    assert contents() == before
    write_json_lines(tmp_path / "generated/replies.jsonl", [reply_row(f"{split}0", 6) for split in SPLITS])
    assert label() != before
