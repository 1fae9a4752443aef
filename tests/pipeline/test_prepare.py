"""Prepare: what is kept, what is counted, and splits that do not leak."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.files import SPLITS, read_json_lines
from pipeline.params import PrepareParams, ShareParams
from pipeline.prepare import near_duplicate_key, prepare, split_of
from serving_plugin.core.errors import ConfigurationError

SHARES = ShareParams(0.7, 0.1, 0.1, 0.1)


def settings(source: Path, **changes: Any) -> PrepareParams:
    params = PrepareParams(
        source=str(source),
        max_prompts=None,
        min_prompt_chars=4,
        max_prompt_chars=200,
        near_duplicate_chars=16,
        shares=SHARES,
    )
    return dataclasses.replace(params, **changes)


def source_of(folder: Path, prompts: list[str]) -> Path:
    rows = [
        {"id": f"root{i}_0", "conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": f"reply {i}"}]}
        for i, p in enumerate(prompts)
    ]
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(rows))
    return path


def splits_in(folder: Path) -> dict[str, list[dict[str, str]]]:
    return {name: list(read_json_lines(folder / f"{name}.jsonl", "prepare")) for name in SPLITS}


def test_every_row_is_kept_or_counted(tmp_path: Path) -> None:
    prompts = [f"{i} is the number of this prompt" for i in range(200)]
    prompts += ["hi", "x" * 201, "0 IS the number  of this prompt"]
    report = prepare(settings(source_of(tmp_path, prompts)), 0, tmp_path / "out")
    assert report["num_prompts"] == 200
    assert report["dropped"] == {"prompt_too_long": 1, "prompt_too_short": 1, "same_prompt_as_an_earlier_row": 1}
    assert report["num_conversations"] == report["num_prompts"] + sum(report["dropped"].values())
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    rows = splits_in(tmp_path / "out")
    assert {name: len(kept) for name, kept in rows.items()} == report["splits"]
    assert rows["test"][0].keys() >= {"id", "root_id", "prompt", "reply"}


def test_no_root_and_no_template_is_in_two_splits(tmp_path: Path) -> None:
    prompts = [f"Translate this sentence into French please: {i}" for i in range(60)]
    prompts += [f"{i} is the number of this prompt" for i in range(100)]
    report = prepare(settings(source_of(tmp_path, prompts)), 0, tmp_path / "out")
    homes: dict[str, set[str]] = {}
    for split, rows in splits_in(tmp_path / "out").items():
        for row in rows:
            homes.setdefault(row["root_id"], set()).add(split)
            homes.setdefault(near_duplicate_key(row["prompt"], 16), set()).add(split)
    assert all(len(splits) == 1 for splits in homes.values())
    assert report["num_moved_to_the_split_of_a_near_duplicate"] > 0


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    path = source_of(tmp_path, [f"{i} is the number of this prompt" for i in range(100)])
    for name in ("one", "two"):
        prepare(settings(path), 3, tmp_path / name)
    for name in SPLITS:
        assert (tmp_path / "one" / f"{name}.jsonl").read_bytes() == (tmp_path / "two" / f"{name}.jsonl").read_bytes()


def test_at_most_max_prompts(tmp_path: Path) -> None:
    path = source_of(tmp_path, [f"{i} is the number of this prompt" for i in range(150)])
    report = prepare(settings(path, max_prompts=100), 0, tmp_path / "out")
    assert report["num_prompts"] == 100
    assert report["dropped"] == {"over_max_prompts": 50}


def test_an_empty_split_is_an_error_that_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"raise prepare.max_prompts"):
        prepare(settings(source_of(tmp_path, ["just one prompt"])), 0, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "words"),
    [("no JSON at all", "expected a JSON array"), ("[]", "no prompt fell into"), ("[{]", "is damaged after 0")],
)
def test_a_bad_source_is_one_clear_error(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "f.json").write_text(content + " " * 30)
    with pytest.raises(ConfigurationError, match=words):
        prepare(settings(tmp_path / "f.json"), 0, tmp_path / "out")


@given(root_id=st.text(min_size=1), seed=st.integers(0, 2**32))
def test_a_split_depends_on_root_and_seed_alone(root_id: str, seed: int) -> None:
    root_id = root_id.encode("utf-8", "replace").decode()
    assert split_of(root_id, seed, SHARES.as_dict()) == split_of(root_id, seed, SHARES.as_dict())
    assert split_of(root_id, seed, {"train": 0.0, "validation": 0.0, "calibration": 0.0, "test": 1.0}) == "test"


def test_splits_have_their_shares_and_change_with_the_seed() -> None:
    roots = [f"root{i}" for i in range(20_000)]
    first = [split_of(root, 0, SHARES.as_dict()) for root in roots]
    for name, share in SHARES.as_dict().items():
        assert first.count(name) / len(roots) == pytest.approx(share, abs=0.015)
    assert first != [split_of(root, 1, SHARES.as_dict()) for root in roots]
