"""Whole chats from ShareGPT rows: parts joined again, turns cleaned, every reply that may serve as a label.

The file cuts a long conversation into rows `<root>_<n>`, where n is the index of the row's first message in the whole;
a row often begins with the last message of the row before. Joined, the message that is answered has all its context.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from serving_plugin.bench.sharegpt import Conversation, ReadReport, Turn, is_page_markup, without_copy_button

# Reasons in `ReadReport.dropped` that count assistant messages; the others count rows or, once joined, conversations.
REPLY_REASONS = (
    "blank_prompt",
    "blank_reply",
    "repeated_assistant_turn",
    "reply_after_page_markup",
    "reply_is_page_markup",
    "reply_of_a_dropped_row",
    "system_turn_before_the_reply",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation from its first message on. `replies` are the indices of the assistant's messages with a label."""

    root_id: str
    turns: tuple[Turn, ...]
    replies: tuple[int, ...]


def whole_chats(conversations: Iterable[Conversation], report: ReadReport | None = None) -> Iterator[Chat]:
    """Yield every root conversation that has at least one usable reply, in the order of first appearance.

    What is left out is counted in `report.dropped`, repairs in `report.handled`. All rows are held in memory to be
    joined. When all are read, nothing is lost:
      rows              = chats + dropped rows and conversations + handled["part_joined_to_the_one_before"]
      assistant's turns = labels + those dropped (REPLY_REASONS) + handled["reply_repeated_in_an_overlap"]
    """
    report = ReadReport() if report is None else report
    seen: set[bytes] = set()
    for root_id, parts in _by_root(conversations, report).items():
        turns = _joined(parts, report)
        chat = _cleaned(root_id, turns, report)
        if chat is None:
            continue
        digest = hashlib.sha256("\x00".join(f"{t.role}\x01{t.text}" for t in chat.turns).encode()).digest()
        if digest in seen:
            report.dropped["same_conversation_as_an_earlier_one"] += 1
            _count(report.dropped, "reply_of_a_dropped_row", len(chat.replies))
            continue
        seen.add(digest)
        yield chat


def _by_root(conversations: Iterable[Conversation], report: ReadReport) -> dict[str, list[Conversation]]:
    """Rows by root, each part once, in the order of their parts."""
    by_root: dict[str, dict[int, Conversation]] = {}
    for conversation in conversations:
        if not conversation.turns:
            report.dropped["no_turns"] += 1
            continue
        parts = by_root.setdefault(conversation.root_id, {})
        if conversation.part in parts:
            report.dropped["duplicate_id"] += 1
            _count(report.dropped, "reply_of_a_dropped_row", _num_replies(conversation.turns))
            continue
        parts[conversation.part] = conversation
    return {root_id: [parts[part] for part in sorted(parts)] for root_id, parts in by_root.items()}


def _joined(parts: list[Conversation], report: ReadReport) -> list[Turn]:
    """All messages that follow one another from the first on; what has a hole before it is dropped."""
    turns: list[Turn] = []
    for number, part in enumerate(parts):
        overlap = turns[part.part :][: len(part.turns)]
        repeated, new = part.turns[: len(overlap)], part.turns[len(overlap) :]
        if part.part > len(turns) or list(repeated) != overlap:
            missing = part.part > len(turns)
            report.dropped["earlier_part_missing" if missing else "parts_disagree"] += len(parts) - number
            rest = sum(_num_replies(left_out.turns) for left_out in parts[number:])
            _count(report.dropped, "reply_of_a_dropped_row", rest)
            break
        if number:
            report.handled["part_joined_to_the_one_before"] += 1
        _count(report.handled, "reply_repeated_in_an_overlap", _num_replies(repeated))
        turns += new
    return turns


def _cleaned(root_id: str, turns: list[Turn], report: ReadReport) -> Chat | None:
    """The chat without leading banners, with the replies that count; None (counted) when there is none."""
    start = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if not turns:
        return None  # counted with its parts
    if start == len(turns):
        report.dropped["system_turns_only"] += 1
        return None
    if start:
        report.handled["leading_system_turn_skipped"] += 1  # banners of sharing sites, not instructions
    turns = turns[start:]
    if turns[0].role != "user":
        report.dropped["opens_with_the_assistant"] += 1
        _count(report.dropped, "reply_of_a_dropped_row", _num_replies(turns))
        return None
    kept: list[Turn] = []
    replies: list[int] = []
    for index, turn in enumerate(turns):
        if turn.role == "assistant":
            turn = _without_button(turn, report)
            if is_page_markup(turn.text):
                report.dropped["reply_is_page_markup"] += 1
                _count(report.dropped, "reply_after_page_markup", _num_replies(turns[index + 1 :]))
                break  # what follows answers a text whose length nobody knows
            reason = _why_no_label(kept, turn)
            if reason is None:
                replies.append(index)
            else:
                report.dropped[reason] += 1
        elif turn.role == "user" and kept and kept[-1].role == "user":
            report.handled["repeated_user_turn"] += 1
        kept.append(turn)
    if not replies:
        report.dropped["no_reply"] += 1
        return None
    return Chat(root_id, tuple(kept[: replies[-1] + 1]), tuple(replies))


def _num_replies(turns: Iterable[Turn]) -> int:
    return sum(turn.role == "assistant" for turn in turns)


def _count(counter: Counter[str], reason: str, number: int) -> None:
    """Add to a reason, without naming one that never occurred."""
    if number:
        counter[reason] += number


def _without_button(turn: Turn, report: ReadReport) -> Turn:
    text = without_copy_button(turn.text)
    if text == turn.text:
        return turn
    report.handled["copy_button_label_removed"] += 1
    return replace(turn, text=text)


def _why_no_label(before: list[Turn], reply: Turn) -> str | None:
    if before[-1].role == "assistant":
        return "repeated_assistant_turn"
    if before[-1].role == "system":
        return "system_turn_before_the_reply"
    if not before[-1].text.strip():
        return "blank_prompt"
    return None if reply.text.strip() else "blank_reply"
