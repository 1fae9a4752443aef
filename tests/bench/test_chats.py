"""Whole chats: parts joined, every odd row and every reply of the source either used or counted under its reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.bench.chats import REPLY_REASONS, Chat, whole_chats
from serving_plugin.bench.sharegpt import PACKAGE_SOURCE, Conversation, ReadReport, Turn, read_conversations

SHORT = {"human": "user", "gpt": "assistant", "system": "system"}
ROW_REASONS_OF_THE_READER = ("turn_is_not_an_object", "turn_without_role", "turn_without_text", "unknown_role")


def row(row_id: str, *turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": row_id, "conversations": [{"from": role, "value": text} for role, text in turns]}


def talk(root: str, first: int, last: int) -> dict[str, Any]:
    """Messages `first` ... `last` of one long conversation that a user opens, as the file's part `<root>_<first>`."""
    turns = [("gpt" if number % 2 else "human", f"message {number} of {root}") for number in range(first, last + 1)]
    return row(f"{root}_{first}", *turns)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def chats_of(path: Path | str) -> tuple[list[Chat], ReadReport]:
    report = ReadReport()
    return list(whole_chats(read_conversations(path, report), report)), report


def assert_conserved(conversations: list[Conversation], chats: list[Chat], report: ReadReport) -> None:
    """Nothing of what the reader yielded is lost: neither a row nor a message of the assistant."""
    by_row = {reason: n for reason, n in report.dropped.items() if reason not in REPLY_REASONS}
    joined = report.handled["part_joined_to_the_one_before"]
    assert len(conversations) == len(chats) + sum(by_row.values()) + joined
    asked = sum(turn.role == "assistant" for conversation in conversations for turn in conversation.turns)
    labels = sum(len(chat.replies) for chat in chats)
    repeated = report.handled["reply_repeated_in_an_overlap"]
    assert asked == labels + sum(report.dropped[reason] for reason in REPLY_REASONS) + repeated


def test_every_reply_of_a_conversation_is_a_label_with_all_its_context(tmp_path: Path) -> None:
    chats, report = chats_of(write(tmp_path / "f.json", [talk("a", 0, 5)]))
    turns = tuple(Turn("assistant" if n % 2 else "user", f"message {n} of a") for n in range(6))
    assert chats == [Chat("a", turns, (1, 3, 5))]
    assert not report.dropped
    assert not report.handled


HELLO = (("human", "hello there"), ("gpt", "hi"))


@pytest.mark.parametrize(
    ("turns", "replies", "dropped", "handled"),
    [
        ([], None, {"no_turns": 1}, {}),
        ([("human", "only a question")], None, {"no_reply": 1}, {}),
        ([("gpt", "only an answer")], None, {"opens_with_the_assistant": 1, "reply_of_a_dropped_row": 1}, {}),
        (
            [("gpt", "an answer first"), *HELLO],
            None,
            {"opens_with_the_assistant": 1, "reply_of_a_dropped_row": 2},
            {},
        ),
        ([("system", "banner")], None, {"system_turns_only": 1}, {}),
        ([("system", "banner"), *HELLO], (1,), {}, {"leading_system_turn_skipped": 1}),
        ([*HELLO, ("system", "be brief"), ("human", "q"), ("gpt", "a")], (1, 4), {}, {}),
        ([("human", "q"), ("system", "s"), ("gpt", "a")], None, {"system_turn_before_the_reply": 1, "no_reply": 1}, {}),
        ([*HELLO, ("human", "one"), ("human", "two"), ("gpt", "a")], (1, 4), {}, {"repeated_user_turn": 1}),
        ([*HELLO, ("gpt", "and more"), ("human", "q"), ("gpt", "a")], (1, 4), {"repeated_assistant_turn": 1}, {}),
        ([*HELLO, ("human", ""), ("gpt", "a")], (1,), {"blank_prompt": 1}, {}),
        ([*HELLO, ("human", " \n\t"), ("gpt", "a")], (1,), {"blank_prompt": 1}, {}),
        ([("human", "q"), ("gpt", ""), *HELLO], (3,), {"blank_reply": 1}, {}),
        ([("human", ""), ("gpt", "")], None, {"blank_prompt": 1, "no_reply": 1}, {}),
        (
            [*HELLO, ("human", "q"), ("gpt", '<div class="markdown">a</div>'), *HELLO],
            (1,),
            {"reply_is_page_markup": 1, "reply_after_page_markup": 1},
            {},
        ),
        (
            [("human", "q"), ("gpt", "<p>a</p>")],
            None,
            {"reply_is_page_markup": 1, "no_reply": 1},
            {},
        ),
        ([("human", "what is <div> for?"), ("gpt", "A box: <div>")], (1,), {}, {}),
        (
            [("human", "show"), ("gpt", "Here:\npythonCopy codeprint(1)"), *HELLO],
            (1, 3),
            {},
            {"copy_button_label_removed": 1},
        ),
        ([*HELLO, ("human", "no answer any more")], (1,), {}, {}),
    ],
)
def test_an_odd_conversation_has_a_counted_outcome_and_spoils_no_other(
    tmp_path: Path,
    turns: list[tuple[str, str]],
    replies: tuple[int, ...] | None,
    dropped: dict[str, int],
    handled: dict[str, int],
) -> None:
    path = write(tmp_path / "f.json", [talk("before", 0, 1), row("odd_0", *turns), talk("after", 0, 1)])
    chats, report = chats_of(path)
    found = {chat.root_id: chat for chat in chats}
    assert list(found) == ["before", *(["odd"] if replies else []), "after"]
    assert report.dropped == dropped
    assert report.handled == handled
    if replies:
        assert found["odd"].replies == replies
        assert len(found["odd"].turns) == replies[-1] + 1  # nothing behind the last label
        assert all(found["odd"].turns[turn].role == "assistant" for turn in replies)
        assert "Copy code" not in str(found["odd"].turns)
    assert_conserved(list(read_conversations(path)), chats, report)


@pytest.mark.parametrize("asker", ["human", "user", "User"])
@pytest.mark.parametrize("answerer", ["gpt", "chatgpt", "bing", "bard", "assistant"])
def test_every_name_of_a_role_is_one_of_the_templates(tmp_path: Path, asker: str, answerer: str) -> None:
    turns = [(asker, "q"), (answerer, "a"), ("system", "s"), (asker, "r"), (answerer, "b")]
    chats, report = chats_of(write(tmp_path / "f.json", [row("a_0", *turns)]))
    assert [turn.role for turn in chats[0].turns] == ["user", "assistant", "system", "user", "assistant"]
    assert chats[0].replies == (1, 4)
    assert not report.dropped


def test_role_and_content_may_be_mixed_with_from_and_value(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"from": "gpt", "value": "a"},
        {"from": "human", "content": "r"},
        {"role": "assistant", "value": "b"},
    ]
    chats, report = chats_of(write(tmp_path / "f.json", [{"id": "x", "messages": turns}]))
    assert [turn.text for turn in chats[0].turns] == ["q", "a", "r", "b"]
    assert chats[0].replies == (1, 3)
    assert not report.dropped


@pytest.mark.parametrize(
    ("rows", "num_messages", "dropped", "handled"),
    [
        # abutting, in order and out of order
        ([talk("a", 0, 3), talk("a", 4, 7)], 8, {}, {"part_joined_to_the_one_before": 1}),
        ([talk("a", 4, 7), talk("a", 0, 3)], 8, {}, {"part_joined_to_the_one_before": 1}),
        # the part repeats the last message, several, or nothing but what is there
        (
            [talk("a", 0, 3), talk("a", 3, 7)],
            8,
            {},
            {"part_joined_to_the_one_before": 1, "reply_repeated_in_an_overlap": 1},
        ),
        (
            [talk("a", 0, 5), talk("a", 1, 7)],
            8,
            {},
            {"part_joined_to_the_one_before": 1, "reply_repeated_in_an_overlap": 3},
        ),
        (
            [talk("a", 0, 7), talk("a", 2, 5)],
            8,
            {},
            {"part_joined_to_the_one_before": 1, "reply_repeated_in_an_overlap": 2},
        ),
        # a hole, in the middle or at the front: what follows has lost its context
        (
            [talk("a", 0, 3), talk("a", 6, 9), talk("a", 10, 11)],
            4,
            {"earlier_part_missing": 2, "reply_of_a_dropped_row": 3},
            {},
        ),
        ([talk("a", 2, 5)], 0, {"earlier_part_missing": 1, "reply_of_a_dropped_row": 2}, {}),
        # the overlap says something else
        (
            [talk("a", 0, 3), row("a_3", ("gpt", "something else"), *HELLO)],
            4,
            {"parts_disagree": 1, "reply_of_a_dropped_row": 2},
            {},
        ),
        # one id twice, with the same or with other text: the first one counts
        ([talk("a", 0, 3), talk("a", 0, 3)], 4, {"duplicate_id": 1, "reply_of_a_dropped_row": 2}, {}),
        ([talk("a", 0, 3), row("a_0", *HELLO)], 4, {"duplicate_id": 1, "reply_of_a_dropped_row": 1}, {}),
        ([row("a_0"), talk("a", 0, 3)], 4, {"no_turns": 1}, {}),
    ],
)
def test_parts_of_one_root(
    tmp_path: Path, rows: list[Any], num_messages: int, dropped: dict[str, int], handled: dict[str, int]
) -> None:
    path = write(tmp_path / "f.json", [*rows, talk("other", 0, 1)])
    chats, report = chats_of(path)
    found = {chat.root_id: chat for chat in chats}
    assert "other" in found
    assert report.dropped == dropped
    assert report.handled == handled
    if num_messages:
        assert [turn.text for turn in found["a"].turns] == [f"message {n} of a" for n in range(num_messages)]
        assert found["a"].replies == tuple(range(1, num_messages, 2))
    else:
        assert "a" not in found
    assert_conserved(list(read_conversations(path)), chats, report)


def test_the_same_conversation_under_two_ids_is_one(tmp_path: Path) -> None:
    path = write(tmp_path / "f.json", [row("a_0", *HELLO), row("b_0", *HELLO), row("c_0", HELLO[0], ("gpt", "hey"))])
    chats, report = chats_of(path)
    assert [chat.root_id for chat in chats] == ["a", "c"]
    assert report.dropped == {"same_conversation_as_an_earlier_one": 1, "reply_of_a_dropped_row": 1}
    assert_conserved(list(read_conversations(path)), chats, report)


@pytest.mark.parametrize("num_words", [3, 100_000])
def test_no_prompt_is_too_short_or_too_long_to_be_kept_whole(tmp_path: Path, num_words: int) -> None:
    prompt = "word " * num_words
    chats, report = chats_of(write(tmp_path / "f.json", [row("a_0", ("human", prompt), ("gpt", "a"))]))
    assert chats == [Chat("a", (Turn("user", prompt), Turn("assistant", "a")), (1,))]
    assert not report.dropped


def test_a_file_cut_off_in_the_middle_gives_the_chats_of_its_whole_rows(tmp_path: Path) -> None:
    whole = json.dumps([talk("a", 0, 3), talk("b", 0, 1), talk("a", 3, 7)])
    path = tmp_path / "f.json"
    path.write_text(whole[:-60])
    chats, report = chats_of(path)
    assert [(chat.root_id, chat.replies) for chat in chats] == [("a", (1, 3)), ("b", (1,))]
    assert report.truncated_at_byte is not None
    assert report.truncated_at_byte + report.num_truncated_bytes == len(whole) - 60
    assert not report.dropped


def test_the_package_loses_nothing() -> None:
    report = ReadReport()
    conversations = list(read_conversations(PACKAGE_SOURCE, report))
    chats = list(whole_chats(conversations, report))
    assert_conserved(conversations, chats, report)
    assert len({chat.root_id for chat in chats}) == len(chats) > 9000


TEXTS = st.sampled_from(["", " ", "q", "a", "<p>x</p>", "Copy codex", "a\nbashCopy code ls", "é\ud83d"])
TURNS = st.one_of(
    st.builds(lambda name, text: {"from": name, "value": text}, st.sampled_from([*SHORT, "bing", "user"]), TEXTS),
    st.builds(lambda name, text: {"from": name, "value": text}, st.sampled_from(["human", "gpt"]), TEXTS),
    st.builds(lambda text: {"role": "assistant", "content": text}, TEXTS),
)
BAD_TURNS = st.sampled_from(["text", {"value": "no role"}, {"from": "gpt"}, {"from": "tool", "value": "x"}])
LISTS_OF_TURNS = st.lists(st.one_of(*[TURNS] * 20, BAD_TURNS), max_size=7)
IDS = st.builds(lambda root, part: root + part, st.sampled_from("abc"), st.sampled_from(["", "_0", "_1", "_2", "_5"]))
ROWS = st.lists(st.builds(lambda i, turns: {"id": i, "conversations": turns}, IDS, LISTS_OF_TURNS), max_size=8)


@given(rows=ROWS)
def test_every_row_and_every_reply_is_used_or_counted(
    rows: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("chats") / "f.json", rows)
    report = ReadReport()
    conversations = list(read_conversations(path, report))
    unreadable = Counter(report.dropped)
    assert set(unreadable) <= set(ROW_REASONS_OF_THE_READER)
    assert len(rows) == len(conversations) + sum(unreadable.values())
    report.dropped.clear()
    chats = list(whole_chats(conversations, report))
    assert_conserved(conversations, chats, report)
    for chat in chats:
        assert chat.replies
        assert chat.turns[0].role == "user"
        assert chat.replies[-1] == len(chat.turns) - 1
        for reply in chat.replies:
            assert chat.turns[reply].role == "assistant"
            assert chat.turns[reply].text.strip()
            assert chat.turns[reply - 1].role == "user"
            assert chat.turns[reply - 1].text.strip()


@given(cuts=st.lists(st.integers(0, 11), max_size=4), overlap=st.integers(0, 3), shuffled=st.randoms())
def test_however_a_conversation_was_cut_it_comes_back_whole(cuts: list[int], overlap: int, shuffled: Any) -> None:
    turns = tuple(Turn("assistant" if n % 2 else "user", f"message {n}") for n in range(12))
    edges = sorted({0, 12, *cuts})
    starts = [max(0, start - overlap) for start in edges[:-1]]
    parts = {
        start: Conversation(f"a_{start}", "a", start, turns[start:end])
        for start, end in zip(starts, edges[1:], strict=True)
    }  # of two parts that begin together the longer one is kept, as no file has both
    rows = list(parts.values())
    shuffled.shuffle(rows)
    report = ReadReport()
    assert list(whole_chats(rows, report)) == [Chat("a", turns, (1, 3, 5, 7, 9, 11))]
    assert not report.dropped
    assert report.handled["part_joined_to_the_one_before"] == len(rows) - 1
