"""Label: counts without `</s>`, buckets at every granularity, censored replies, clear errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.files import SPLITS, read_json_lines, write_json_lines
from pipeline.label import bucket_of, count_tokens, generated_lengths, num_buckets, recorded_lengths, run
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


def write_prepared(folder: Path, num_rows: int = 3) -> None:
    for split in SPLITS:
        rows = [
            {"id": f"{split}{i}_0", "root_id": f"{split}{i}", "prompt": f"ask {i}", "reply": "word " * (i * 100 + 1)}
            for i in range(num_rows)
        ]
        write_json_lines(folder / f"{split}.jsonl", rows)


def reply_row(split: str, number: int, output_tokens: int, finish_reason: str) -> dict[str, Any]:
    return {
        "id": f"{split}{number}_0", "root_id": f"{split}{number}", "split": split, "prompt": "ask", "prompt_sha256": "",
        "prompt_tokens": 4, "output_tokens": output_tokens, "finish_reason": finish_reason, "text": "",
    }  # fmt: skip


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


def test_a_reply_at_the_limit_is_censored_and_one_that_ended_there_is_not() -> None:
    batch = {
        "output_tokens": [8, 8, 3, 20],
        "finish_reason": ["length", "stop", "stop", "stop"],
        "prompt_tokens": [1] * 4,
    }
    columns = generated_lengths(batch, 16)
    assert columns["censored"] == [True, False, False, True]
    assert columns["output_tokens"] == [8, 8, 3, 16]
    recorded = recorded_lengths(
        {"prompt": ["p"] * 2, "reply": ["x" * 16, "x" * 17]}, lambda texts: [len(t) for t in texts], 16
    )
    assert recorded["censored"] == [False, True]
    assert recorded["output_tokens"] == [16, 16]


def test_recorded_labels_are_rows_that_training_reads(tmp_path: Path, target: Path) -> None:
    write_prepared(tmp_path / "prepared")
    write_json_lines(tmp_path / "generated/replies.jsonl", [])
    params = params_for(target, max_length_tokens=300, granularity_tokens=100)
    report = run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    count = count_tokens(load_tokenizer(str(target)))
    for split in SPLITS:
        rows = read_rows(tmp_path / "labelled" / f"{split}.jsonl")
        plain = list(read_json_lines(tmp_path / "labelled" / f"{split}.jsonl", "label"))
        assert [row.id for row in rows] == [f"{split}{i}_0" for i in range(3)]
        assert rows[1].output_tokens == min(300, count(["word " * 101])[0])
        assert rows[2].censored == (count(["word " * 201])[0] > 300)
        assert {row.source for row in rows} == {"recorded"}
        assert all(row["bucket"] == row["output_tokens"] // 100 for row in plain)
        assert sum(report["splits"][split]["rows_per_bucket"]) == 3
    assert (tmp_path / "labelled/target_replies.jsonl").read_text() == ""


def test_generated_labels_and_what_they_leave_out(tmp_path: Path, target: Path) -> None:
    rows = [reply_row(split, i, 10 * i + 5, "stop") for split in SPLITS for i in range(2)]
    rows += [
        reply_row("train", 7, 48, "length"),
        reply_row("train", 8, 0, "prompt_too_long"),
        reply_row("test", 9, 0, "stop"),
    ]
    write_json_lines(tmp_path / "generated/replies.jsonl", rows)
    params = params_for(target, source="generated", max_length_tokens=48, granularity_tokens=100)
    report = run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    train = read_rows(tmp_path / "labelled/train.jsonl")
    assert [(row.output_tokens, row.censored) for row in train] == [(5, False), (15, False), (48, True)]
    assert report["dropped"] == {"prompt_too_long": 1, "reply_without_a_token": 1}
    assert report["splits"]["train"]["num_censored"] == 1


def test_recorded_labels_keep_the_targets_replies_beside_them(tmp_path: Path, target: Path) -> None:
    write_prepared(tmp_path / "prepared")
    write_json_lines(tmp_path / "generated/replies.jsonl", [reply_row("test", 1, 48, "length")])
    params = params_for(target)
    run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    replies = read_rows(tmp_path / "labelled/target_replies.jsonl")
    assert [(row.source, row.output_tokens, row.censored) for row in replies] == [("generated", 48, True)]


def test_a_split_without_rows_and_missing_input_name_the_cure(tmp_path: Path, target: Path) -> None:
    write_json_lines(tmp_path / "generated/replies.jsonl", [reply_row("train", 0, 5, "stop")])
    params = params_for(target, source="generated")
    with pytest.raises(ConfigurationError, match=r"no labelled row in validation, calibration, test .*raise generate"):
        run(params, tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
    with pytest.raises(ConfigurationError, match="dvc repro prepare"):
        run(params_for(target), tmp_path / "prepared", tmp_path / "generated", tmp_path / "labelled")
