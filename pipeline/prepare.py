"""Stage prepare: whole, clean conversations of ShareGPT, split so that nothing of the test is met in training.

Reads `prepare.*`; writes data/prepared/{train,validation,calibration,test}.jsonl, one conversation a line
with the indices of its usable replies, and report.json, in which every row of the source is either kept or counted
under the reason why not. The split goes by root conversation, and conversations that share a near-duplicate question
(MinHash, Broder 1997; datasketch) go together.

    python -m pipeline.prepare
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.files import SPLITS, progress, run_stage, write_json, write_json_lines
from pipeline.params import PrepareParams, load_params
from serving_plugin.bench.chats import Chat, whole_chats
from serving_plugin.bench.sharegpt import Conversation, ReadReport, read_conversations
from serving_plugin.core.errors import ConfigurationError

PREPARED_FOLDER = Path("data/prepared")
NUM_PERMUTATIONS = 128
_WORD = re.compile(r"\w+")
_MAX_WORDS = 400  # of a question: two that agree so far are one template
_SHINGLE_WORDS = 3


@dataclass(frozen=True, slots=True)
class _Question:
    """A question long enough to be compared: its conversation's number and its word triples."""

    chat: int
    shingles: frozenset[bytes]


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


def shingles_of(text: str, min_words: int) -> frozenset[bytes]:
    """Word triples of a question's beginning; empty when it has fewer than `min_words` words."""
    words = _WORD.findall(text[: 20 * _MAX_WORDS].lower())[:_MAX_WORDS]
    if len(words) < max(min_words, _SHINGLE_WORDS):
        return frozenset()
    triples = (words[i : i + _SHINGLE_WORDS] for i in range(len(words) - _SHINGLE_WORDS + 1))
    return frozenset(" ".join(triple).encode() for triple in triples)


def near_duplicate_groups(chats: Sequence[Chat], params: PrepareParams) -> list[str]:
    """For each conversation the root id of the first one of its group: two belong together if any of their questions
    are near-duplicates, directly or through others."""
    questions = [
        _Question(number, shingles)
        for number, chat in enumerate(chats)
        for turn in chat.turns
        if turn.role == "user" and (shingles := shingles_of(turn.text, params.near_duplicate_min_words))
    ]
    leader = list(range(len(chats)))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    for left, right in _near_pairs(questions, params.near_duplicate_similarity):
        a, b = find(questions[left].chat), find(questions[right].chat)
        leader[max(a, b)] = min(a, b)
    return [chats[find(number)].root_id for number in range(len(chats))]


def _near_pairs(questions: Sequence[_Question], similarity: float) -> Iterator[tuple[int, int]]:
    """Index pairs whose triples have at least this Jaccard similarity: found by MinHash, confirmed exactly."""
    from datasketch import MinHash, MinHashLSH

    if not questions:
        return
    # looser than asked, since a hash misses what lies at its threshold; what it finds is measured exactly
    index = MinHashLSH(threshold=max(0.1, similarity - 0.15), num_perm=NUM_PERMUTATIONS)
    hashes = MinHash.generator((question.shingles for question in questions), num_perm=NUM_PERMUTATIONS)
    for number, minhash in enumerate(hashes):
        own = questions[number].shingles
        for found in index.query(minhash):
            other = questions[int(found)].shingles
            if len(own & other) >= similarity * len(own | other):
                yield int(found), number
        index.insert(str(number), minhash)


def prepare(params: PrepareParams, folder: Path = PREPARED_FOLDER) -> dict[str, Any]:
    """Run the stage; returns the report.

    Raises:
        ConfigurationError: the source cannot be read, or a split that has a share is empty.
    """
    report = ReadReport()
    progress(f"prepare: reading {params.source}")
    stream = whole_chats(_with_progress(read_conversations(params.source, report)), report)
    chats = list(islice(stream, params.max_conversations))
    for chat in stream:
        report.dropped["over_max_conversations"] += 1
        report.dropped["reply_of_a_dropped_row"] += len(chat.replies)
    progress(f"prepare: {len(chats)} conversations; looking for near-duplicate questions")
    leaders = near_duplicate_groups(chats, params)
    shares, seed = params.shares.as_dict(), params.split_seed
    splits = [split_of(leader, seed, shares) for leader in leaders]
    empty = [name for name, share in shares.items() if share > 0 and name not in splits]
    if empty:
        raise ConfigurationError(
            f"no conversation fell into {', '.join(empty)} ({len(chats)} conversations in all): raise "
            f"prepare.max_conversations or give a larger prepare.source"
        )
    for name in SPLITS:
        chosen = (chat for chat, split in zip(chats, splits, strict=True) if split == name)
        write_json_lines(folder / f"{name}.jsonl", map(_row, chosen))
    result = {
        **report.to_json(),
        "num_chats": len(chats),
        "num_replies": sum(len(chat.replies) for chat in chats),
        "splits": {name: _describe(chats, splits, name) for name in SPLITS},
        "num_moved_to_the_split_of_a_near_duplicate": sum(
            split != split_of(chat.root_id, params.split_seed, shares)
            for chat, split in zip(chats, splits, strict=True)
        ),
    }
    write_json(folder / "report.json", result)
    _say(result)
    return result


def _row(chat: Chat) -> dict[str, Any]:
    return {
        "root_id": chat.root_id,
        "messages": [{"role": turn.role, "content": turn.text} for turn in chat.turns],
        "replies": list(chat.replies),
    }


def _describe(chats: Sequence[Chat], splits: Sequence[str], name: str) -> dict[str, int]:
    chosen = [chat for chat, split in zip(chats, splits, strict=True) if split == name]
    return {"num_chats": len(chosen), "num_replies": sum(len(chat.replies) for chat in chosen)}


def _with_progress(conversations: Iterable[Conversation], every: int = 5000) -> Iterator[Conversation]:
    for number, conversation in enumerate(conversations, start=1):
        if number % every == 0:
            progress(f"prepare: {number} rows read")
        yield conversation


def _say(result: Mapping[str, Any]) -> None:
    dropped = ", ".join(f"{reason} {count}" for reason, count in result["dropped"].items())
    splits = ", ".join(f"{name} {split['num_replies']}" for name, split in result["splits"].items())
    progress(f"prepare: {result['num_conversations']} rows, dropped: {dropped or 'none'}")
    if result["truncated_at_byte"] is not None:
        progress(
            f"prepare: the source is cut off: its last {result['num_truncated_bytes']} bytes, from byte "
            f"{result['truncated_at_byte']}, are no whole row"
        )
    progress(f"prepare: {result['num_chats']} conversations, {result['num_replies']} replies: {splits}")


def main() -> None:
    """Entry point."""
    prepare(load_params().prepare)


if __name__ == "__main__":
    run_stage(main)
