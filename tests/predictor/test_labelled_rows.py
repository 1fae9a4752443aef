"""Labelled rows: both forms of a line, and lines that are neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import Message
from serving_plugin.predictor.rows import LabelledRow, read_rows

CONVERSATION: dict[str, Any] = {
    "root_id": "c1",
    "source": "generated",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "p\u2028q"},
        {"role": "assistant", "content": "r"},
        {"role": "user", "content": "and?"},
    ],
    "replies": [
        {"turn": 2, "output_tokens": 7, "censored": False},
        {"turn": 4, "output_tokens": 9, "censored": False},
        {"turn": 4, "output_tokens": 50, "censored": True},
    ],
}


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_a_conversation_is_a_row_for_every_reply_and_sample(tmp_path: Path) -> None:
    messages = tuple(Message(one["role"], one["content"]) for one in CONVERSATION["messages"])
    first, second, third = read_rows(write(tmp_path / "rows.jsonl", CONVERSATION))
    assert first == LabelledRow("c1:2", "c1", "generated", messages[:2], 7, False)
    assert second == LabelledRow("c1:4", "c1", "generated", messages, 9, False)
    assert third == LabelledRow("c1:4", "c1", "generated", messages, 50, True)
    assert [row.num_earlier_replies for row in (first, second)] == [0, 1]
    assert [row.prompt for row in (first, second)] == ["p\u2028q", "and?"]


def test_a_single_prompt_may_be_short(tmp_path: Path) -> None:
    full = {
        "id": "b", "root_id": "root", "source": "recorded", "prompt": "q", "output_tokens": 3, "censored": True,
    }  # fmt: skip
    path = write(tmp_path / "rows.jsonl", {"id": "a", "prompt": "p", "output_tokens": 12}, "", full)
    assert read_rows(path) == [
        LabelledRow("a", "a", "given", (Message("user", "p"),), 12, False),
        LabelledRow("b", "root", "recorded", (Message("user", "q"),), 3, True),
    ]


def test_rows_keep_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [{"id": str(i), "prompt": "p", "output_tokens": i} for i in range(5)]
    rows = read_rows(write(tmp_path / "rows.jsonl", *lines[:2], CONVERSATION, *lines[2:]))
    assert [row.id for row in rows] == ["0", "1", "c1:2", "c1:4", "c1:4", "2", "3", "4"]


def with_reply(**changes: Any) -> dict[str, Any]:
    return {**CONVERSATION, "replies": [{**CONVERSATION["replies"][0], **changes}]}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in CONVERSATION.items() if name != key}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a labelled row"),
        ("[1]", "not a labelled row"),
        ("3", "not a labelled row"),
        ("null", "not a labelled row"),
        ('"prompt"', "not a labelled row"),
        ({"id": "a"}, "the row lacks 'root_id'"),
        ({"id": "a", "prompt": "p"}, "the row lacks 'output_tokens'"),
        ({"prompt": "p", "output_tokens": 1}, "the row lacks 'id'"),
        ({"id": "a", "prompt": "p", "output_tokens": -1}, "output_tokens -1 is not from 0 to"),
        ({"id": "a", "prompt": "p", "output_tokens": None}, "not a labelled row"),
        ('{"id": "a", "prompt": "p", "output_tokens": NaN}', "not a labelled row"),
        ('{"id": "a", "prompt": "p", "output_tokens": Infinity}', "not a labelled row"),
        ({"id": "a", "prompt": "p", "output_tokens": 1e30}, "is not from 0 to"),
        ({"id": "a", "prompt": "p", "output_tokens": 1, "censored": "false"}, "censored is 'false', expected true or"),
        (with_reply(censored=1), "censored is 1, expected true or false"),
        (without("root_id"), "the row lacks 'root_id'"),
        (without("source"), "the row lacks 'source'"),
        (without("messages"), "the row lacks 'messages'"),
        (without("replies"), "the row lacks 'replies'"),
        ({**CONVERSATION, "messages": "hello"}, "messages are a str"),
        ({**CONVERSATION, "messages": ["hello"]}, "a message is a str"),
        ({**CONVERSATION, "replies": None}, "not a labelled row"),
        ({**CONVERSATION, "replies": [5]}, "not a labelled row"),
        (with_reply(turn=0), "turn 0 is outside the 4 messages"),
        (with_reply(turn=5), "turn 5 is outside the 4 messages"),
        (with_reply(turn="x"), "not a labelled row"),
        (with_reply(output_tokens=-3), "output_tokens -3 is not from 0 to"),
    ],
)
def test_bad_line_is_named_by_its_number(line: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", CONVERSATION, "", line, CONVERSATION)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "dvc repro label" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["", {**CONVERSATION, "replies": []}])
def test_no_rows_at_all_is_an_error(line: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no rows"):
        read_rows(write(tmp_path / "rows.jsonl", line))


def test_missing_file_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.jsonl cannot be read .*dvc repro label"):
        read_rows(tmp_path / "none.jsonl")


def test_what_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\x80\x81\n")
    with pytest.raises(ConfigurationError, match=r"rows\.jsonl is no UTF-8 text .*dvc repro label"):
        read_rows(path)
