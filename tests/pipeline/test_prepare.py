"""Prepare: what is kept, what is counted, and splits that do not leak."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.files import SPLITS, read_json_lines
from pipeline.params import PrepareParams, ShareParams
from pipeline.prepare import near_duplicate_groups, prepare, shingles_of, split_of
from serving_plugin.bench.chats import REPLY_REASONS, Chat
from serving_plugin.bench.sharegpt import Turn
from serving_plugin.core.errors import ConfigurationError

SHARES = ShareParams(0.7, 0.1, 0.1, 0.1)
WORDS = [f"word{i}" for i in range(2000)]


def settings(source: Path | str = "nowhere", **changes: Any) -> PrepareParams:
    params = PrepareParams(
        source=str(source),
        split_seed=0,
        max_conversations=None,
        near_duplicate_similarity=0.7,
        near_duplicate_min_words=12,
        shares=SHARES,
    )
    return dataclasses.replace(params, **changes)


def row(row_id: str, *texts: str) -> dict[str, Any]:
    """Texts alternate and begin with the user's."""
    turns = [{"from": "gpt" if i % 2 else "human", "value": text} for i, text in enumerate(texts)]
    return {"id": row_id, "conversations": turns}


def numbered(num: int) -> list[dict[str, Any]]:
    """Conversations of one short question each, which are like no other."""
    return [row(f"root{i}_0", f"{i} is the number", f"reply {i}") for i in range(num)]


def source_of(folder: Path, rows: Sequence[dict[str, Any]], name: str = "sharegpt.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(rows))
    return path


def splits_in(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: list(read_json_lines(folder / f"{name}.jsonl", "prepare")) for name in SPLITS}


def home_of(folder: Path) -> dict[str, str]:
    return {row["root_id"]: split for split, rows in splits_in(folder).items() for row in rows}


def triples(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False)) if len(words) >= 12 else set()


def similarity(one: set[Any], two: set[Any]) -> float:
    return len(one & two) / len(one | two) if one and two else 0.0


def with_changed_words(draw: random.Random, words: Sequence[str], num_changed: int) -> str:
    places = set(draw.sample(range(len(words)), num_changed))
    return " ".join(draw.choice(WORDS) if i in places else word for i, word in enumerate(words))


def planted(num_families: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations whose questions, in any turn, are one to four words off those of another conversation."""
    draw = random.Random(seed)
    rows = []
    for family in range(num_families):
        words = draw.sample(WORDS, draw.randint(30, 120))
        for member in range(draw.randint(1, 4)):
            near = with_changed_words(draw, words, draw.randint(0, 4))
            other = " ".join(draw.sample(WORDS, 20))
            texts = [near, "a", other, "b"] if draw.random() < 0.5 else [other, "a", near, "b"]
            rows.append(row(f"family{family}member{member}_0", *texts))
    draw.shuffle(rows)
    return rows


def leaks(folder: Path, limit: float) -> Iterator[tuple[str, str, float]]:
    """Pairs of questions in two splits that are at least `limit` alike: every pair compared, nothing estimated."""
    questions = [
        (split, message["content"], triples(message["content"]))
        for split, rows in splits_in(folder).items()
        for row in rows
        for message in row["messages"]
        if message["role"] == "user"
    ]
    for one, two in combinations(questions, 2):
        if one[0] != two[0] and similarity(one[2], two[2]) >= limit:
            yield one[1], two[1], similarity(one[2], two[2])


def test_every_row_and_every_reply_is_kept_or_counted(tmp_path: Path) -> None:
    rows = numbered(200)
    rows += [
        row("long_0", "question one", "a", "question two", "b"),
        row("long_3", "b"),  # says that the user spoke message 3
        row("empty_0"),
        row("silent_0", "nobody answers"),
        row("blank_0", "question", " ", "", "to nothing", "and now?", "yes"),
        row("copy_0", "0 is the number", "reply 0"),
        row("root0_0", "the same id", "again"),
        {"id": "system_0", "conversations": [{"from": "system", "value": "banner"}]},
        {"id": "tool_0", "conversations": [{"from": "tool", "value": "x"}]},
    ]
    report = prepare(settings(source_of(tmp_path, rows)), tmp_path / "out")
    assert report["num_chats"] == 202
    assert report["num_replies"] == 203
    assert report["dropped"] == {
        "blank_prompt": 1,
        "blank_reply": 1,
        "duplicate_id": 1,
        "no_reply": 1,
        "no_turns": 1,
        "parts_disagree": 1,
        "reply_of_a_dropped_row": 2,
        "same_conversation_as_an_earlier_one": 1,
        "system_turns_only": 1,
        "unknown_role": 1,
    }
    by_row = sum(n for reason, n in report["dropped"].items() if reason not in REPLY_REASONS)
    assert len(rows) == report["num_chats"] + by_row + report["handled"].get("part_joined_to_the_one_before", 0)
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    written = splits_in(tmp_path / "out")
    for name, kept in written.items():
        counts = {"num_chats": len(kept), "num_replies": sum(len(row["replies"]) for row in kept)}
        assert report["splits"][name] == counts
    assert sum(split["num_chats"] for split in report["splits"].values()) == report["num_chats"]
    assert sum(split["num_replies"] for split in report["splits"].values()) == report["num_replies"]


def test_a_row_holds_the_conversation_up_to_its_last_label(tmp_path: Path) -> None:
    rows = [*numbered(100), row("talk_0", "q", "a", "", "to nothing"), row("talk_4", "r", "b", "no answer")]
    prepare(settings(source_of(tmp_path, rows)), tmp_path / "out")
    found = [row for rows in splits_in(tmp_path / "out").values() for row in rows if row["root_id"] == "talk"]
    assert found == [
        {
            "root_id": "talk",
            "messages": [
                {"role": "assistant" if i % 2 else "user", "content": text}
                for i, text in enumerate(["q", "a", "", "to nothing", "r", "b"])
            ],
            "replies": [1, 5],
        }
    ]


def test_no_root_and_no_near_duplicate_is_in_two_splits(tmp_path: Path) -> None:
    rows = planted()
    report = prepare(settings(source_of(tmp_path, rows)), tmp_path / "out")
    roots = [row["root_id"] for kept in splits_in(tmp_path / "out").values() for row in kept]
    assert len(roots) == len(set(roots)) == len(rows) == report["num_chats"]
    assert list(leaks(tmp_path / "out", 0.7)) == []
    assert report["num_moved_to_the_split_of_a_near_duplicate"] > 10
    # the plants are there to be found: with every group apart there would be leaks
    prepare(settings(source_of(tmp_path, rows), near_duplicate_min_words=10_000), tmp_path / "apart")
    assert len(list(leaks(tmp_path / "apart", 0.7))) > 10


def test_parts_of_one_root_are_in_one_split(tmp_path: Path) -> None:
    rows = [row(f"root{i}_{part}", f"question {i} {part}", "reply") for part in (0, 2, 4) for i in range(100)]
    report = prepare(settings(source_of(tmp_path, rows)), tmp_path / "out")
    assert report["num_chats"] == 100
    assert report["num_replies"] == 300
    assert len(home_of(tmp_path / "out")) == 100


def chat(root_id: str, *questions: str) -> Chat:
    turns = tuple(turn for question in questions for turn in (Turn("user", question), Turn("assistant", "a")))
    return Chat(root_id, turns, tuple(range(1, len(turns), 2)))


def test_near_duplicates_are_grouped_directly_or_through_others() -> None:
    a, b, c = (" ".join(WORDS[start : start + 20]) for start in (0, 100, 200))
    chats = [
        chat("alone", c),
        chat("first", a),
        chat("other", b),
        chat("bridge", "a short one", a.upper(), f"please: {b}"),
        chat("short", "a short one"),
        chat("short2", "a short one"),
    ]
    leaders = near_duplicate_groups(chats, settings())
    assert leaders == ["alone", "first", "first", "first", "short", "short2"]
    assert near_duplicate_groups(chats, settings(near_duplicate_similarity=1.0)) == [
        "alone", "first", "other", "first", "short", "short2",
    ]  # fmt: skip
    assert near_duplicate_groups([], settings()) == []


def test_an_answer_in_common_is_no_near_duplicate() -> None:
    turns = (Turn("user", "a short one"), Turn("assistant", " ".join(WORDS[:50])))
    chats = [Chat("one", turns, (1,)), Chat("two", (Turn("user", "another one"), turns[1]), (1,))]
    assert near_duplicate_groups(chats, settings()) == ["one", "two"]


@given(words=st.lists(st.sampled_from(["a", "b", "c"]), max_size=30), min_words=st.integers(3, 20))
def test_shingles_are_the_words_triples_whatever_stands_between_them(words: list[str], min_words: int) -> None:
    found = shingles_of(" ".join(words), min_words)
    assert found == shingles_of("-\n".join(words).upper() + "?", min_words)
    if len(words) >= min_words:
        assert found == {" ".join(words[i : i + 3]).encode() for i in range(len(words) - 2)}
    else:
        assert not found


def test_splits_stay_when_the_source_grows(tmp_path: Path) -> None:
    rows = planted(seed=1)
    more = planted(seed=2)
    draw = random.Random(3)
    for number, old in enumerate(rows[::3]):  # near-duplicates of what is there join it
        words = old["conversations"][0]["value"].split()
        more.append(row(f"new{number}_0", with_changed_words(draw, words, 1), "reply"))
    renamed = [{**new, "id": f"more{new['id']}"} for new in more]
    prepare(settings(source_of(tmp_path, rows)), tmp_path / "small")
    prepare(settings(source_of(tmp_path, [*rows, *renamed], "big.json")), tmp_path / "big")
    before, after = home_of(tmp_path / "small"), home_of(tmp_path / "big")
    assert len(after) == len(rows) + len(renamed)
    assert {root: after[root] for root in before} == before
    assert list(leaks(tmp_path / "big", 0.7)) == []


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    path = source_of(tmp_path, planted())
    for name in ("one", "two"):
        prepare(settings(path), tmp_path / name)
    for name in SPLITS:
        assert (tmp_path / "one" / f"{name}.jsonl").read_bytes() == (tmp_path / "two" / f"{name}.jsonl").read_bytes()


def test_at_most_max_conversations_the_first_ones(tmp_path: Path) -> None:
    report = prepare(settings(source_of(tmp_path, numbered(150)), max_conversations=100), tmp_path / "out")
    assert report["num_chats"] == 100
    assert set(home_of(tmp_path / "out")) == {f"root{i}" for i in range(100)}


def test_an_empty_split_is_an_error_that_names_the_cure_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"raise prepare.max_conversations"):
        prepare(settings(source_of(tmp_path, numbered(1))), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", [b'{"root_id": "a"', b"5", b"", b'{"root_id": "\xff"}'])
def test_a_damaged_line_names_its_place_and_the_cure(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"root_id": "a"}\n' + line + b"\n")
    rows = read_json_lines(path, "prepare")
    assert next(rows) == {"root_id": "a"}
    with pytest.raises(ConfigurationError, match=r"^[^\n]*train.jsonl:2: [^\n]*delete [^\n]*dvc repro prepare`$"):
        next(rows)


@pytest.mark.parametrize(
    ("content", "words"),
    [("no JSON at all", "expected a JSON array"), ("[]", "no conversation fell into"), ("[{]", "is damaged after 0")],
)
def test_a_bad_source_is_one_clear_error(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "f.json").write_text(content + " " * 30)
    with pytest.raises(ConfigurationError, match=words):
        prepare(settings(tmp_path / "f.json"), tmp_path / "out")


def test_a_split_is_the_same_in_every_version(tmp_path: Path) -> None:
    prepare(settings(source_of(tmp_path, numbered(24))), tmp_path / "out")
    others = {7: "test", 14: "validation", 16: "validation", 17: "validation", 23: "calibration"}
    assert home_of(tmp_path / "out") == {f"root{i}": others.get(i, "train") for i in range(24)}


@given(root_id=st.text(min_size=1), seed=st.integers(0, 2**32))
def test_a_split_without_a_share_gets_nothing(root_id: str, seed: int) -> None:
    root_id = root_id.encode("utf-8", "replace").decode()
    assert split_of(root_id, seed, {"train": 0.0, "validation": 0.0, "calibration": 0.0, "test": 1.0}) == "test"


def test_splits_have_their_shares_and_change_with_the_seed() -> None:
    roots = [f"root{i}" for i in range(20_000)]
    first = [split_of(root, 0, SHARES.as_dict()) for root in roots]
    for name, share in SHARES.as_dict().items():
        assert first.count(name) / len(roots) == pytest.approx(share, abs=0.015)
    assert first != [split_of(root, 1, SHARES.as_dict()) for root in roots]
