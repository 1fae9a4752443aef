"""The ShareGPT reader: whole conversations, every odd row named, memory flat."""

from __future__ import annotations

import gzip
import json
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.bench.sharegpt import PACKAGE_SOURCE, FirstPair, ReadReport, first_pairs, read_conversations
from serving_plugin.core.errors import ConfigurationError

PAIR = [{"from": "human", "value": "How are you?"}, {"from": "gpt", "value": "Fine."}]


def row(turns: Any, row_id: Any = "a_0") -> dict[str, Any]:
    return {"id": row_id, "conversations": turns}


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in pairs]


def read(path: Path) -> tuple[list[FirstPair], ReadReport]:
    report = ReadReport()
    return list(first_pairs(read_conversations(path, report), report)), report


def write(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_the_package_is_cut_off_and_gives_17671_whole_conversations() -> None:
    report = ReadReport()
    pairs = list(first_pairs(read_conversations(PACKAGE_SOURCE, report), report))
    assert report.num_conversations == 17_671
    assert report.truncated_at_byte == 125_506_645
    assert report.truncated_at_byte + report.num_truncated_bytes == 125_509_632
    assert len(pairs) + sum(report.dropped.values()) == 17_671
    assert report.dropped["no_turns"] == 126
    assert len({pair.root_id for pair in pairs}) == len(pairs)


def test_memory_stays_flat(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    one = json.dumps(row(turns(("human", "x" * 20_000), ("gpt", "y" * 20_000))))
    path.write_text("[" + ",".join([one] * 500) + "]")  # 20 MB
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_conversations(path)) == 500
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5_000_000


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("text", "row_is_not_an_object"),
        (7, "row_is_not_an_object"),
        ({"id": "a_0"}, "no_list_of_turns"),
        (row(None), "no_list_of_turns"),
        (row("text"), "no_list_of_turns"),
        (row(["text"]), "turn_is_not_an_object"),
        (row([{"value": "no role"}]), "turn_without_role"),
        (row([{"from": None, "value": "x"}]), "turn_without_role"),
        (row([{"from": "human"}]), "turn_without_text"),
        (row([{"from": "human", "value": None}]), "turn_without_text"),
        (row([{"from": "human", "value": ["x"]}]), "turn_without_text"),
        (row(turns(("tool", "x"))), "unknown_role"),
        (row([]), "no_turns"),
        (row(turns(("human", "only a question"))), "no_reply"),
        (row(turns(("gpt", "an answer first"), ("human", "q"))), "opens_with_the_assistant"),
        (row(turns(("system", "banner"))), "system_turns_only"),
        (row(turns(("human", "a"), ("human", "b"), ("gpt", "c"))), "repeated_user_turn"),
        (row(turns(("human", "a"), ("system", "b"), ("gpt", "c"))), "system_turn_before_the_reply"),
        (row(turns(("human", " \n"), ("gpt", "c"))), "blank_prompt"),
        (row(turns(("human", "a"), ("gpt", ""))), "blank_reply"),
        (row(turns(("human", "a"), ("gpt", '<div class="markdown">c</div>'))), "reply_is_page_markup"),
        (row(PAIR, "a_4"), "continues_an_earlier_part"),
    ],
)
def test_an_odd_row_is_dropped_under_its_reason_and_spoils_no_other(tmp_path: Path, bad: Any, reason: str) -> None:
    pairs, report = read(write(tmp_path / "f.json", [row(PAIR, "b_0"), bad, row(PAIR, "c_0")]))
    assert [pair.id for pair in pairs] == ["b_0", "c_0"]
    assert report.dropped == {reason: 1}
    assert report.truncated_at_byte is None


@pytest.mark.parametrize("asker", ["human", "user", "Human"])
@pytest.mark.parametrize("answerer", ["gpt", "chatgpt", "bing", "bard", "assistant"])
def test_every_name_of_a_role(tmp_path: Path, asker: str, answerer: str) -> None:
    pairs, report = read(write(tmp_path / "f.json", [row(turns((asker, "q"), (answerer, "a")))]))
    assert pairs == [FirstPair("a_0", "a", "q", "a")]
    assert not report.dropped


def test_role_and_content_may_be_mixed_with_from_and_value(tmp_path: Path) -> None:
    mixed = [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}]
    pairs, _ = read(write(tmp_path / "f.json", [{"id": "x", "messages": mixed}]))
    assert pairs == [FirstPair("x", "x", "q", "a")]


def test_handled_rows_are_counted(tmp_path: Path) -> None:
    rows = [
        row(turns(("system", "banner"), ("human", "q"), ("gpt", "a")), "s_0"),
        row(turns(("human", "show"), ("gpt", "Here:\npythonCopy codeprint(1)")), "t_0"),
        row(turns(("human", "bad \ud83d here"), ("gpt", "a")), "u_0"),
        {"conversations": PAIR},
    ]
    pairs, report = read(write(tmp_path / "f.json", rows))
    assert pairs[1].reply == "Here:\npythonprint(1)"
    assert pairs[2].prompt == "bad \ufffd here"
    assert pairs[3].id == "row3"
    assert report.handled == {
        "leading_system_turn_skipped": 1,
        "copy_button_label_removed": 1,
        "lone_surrogate_replaced": 1,
        "id_made_from_row_number": 1,
    }


def test_a_second_row_with_the_same_id_is_dropped(tmp_path: Path) -> None:
    pairs, report = read(write(tmp_path / "f.json", [row(PAIR), row(PAIR)]))
    assert len(pairs) == 1
    assert report.dropped == {"duplicate_id": 1}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("lines", [False, True])
def test_array_or_lines_plain_or_gzip_with_a_byte_order_mark(tmp_path: Path, lines: bool, zipped: bool) -> None:
    rows = [row(PAIR, f"r{i}_0") for i in range(3)]
    text = "\n\n".join(json.dumps(one) for one in rows) if lines else json.dumps(rows, indent=1)
    content = b"\xef\xbb\xbf\n " + text.encode()
    path = tmp_path / "data"
    path.write_bytes(gzip.compress(content) if zipped else content)
    pairs, report = read(path)
    assert [pair.id for pair in pairs] == ["r0_0", "r1_0", "r2_0"]
    assert report.truncated_at_byte is None


def test_a_bad_line_is_counted_and_a_bad_last_line_is_a_cut(tmp_path: Path) -> None:
    good = json.dumps(row(PAIR))
    path = tmp_path / "f.jsonl"
    path.write_text(f'{good}\n{{"id": "x", "conv\n{json.dumps(row(PAIR, "b_0"))}\n{good[:20]}')
    pairs, report = read(path)
    assert [pair.id for pair in pairs] == ["a_0", "b_0"]
    assert report.dropped == {"line_is_not_json": 1}
    assert report.num_truncated_bytes == 20


@given(data=st.data())
def test_a_cut_anywhere_gives_the_whole_rows_before_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [row(turns(("human", f'q{i} é\u2028\\" 𝄞'), ("gpt", "a" * i)), f"r{i}_0") for i in range(1, 6)]
    whole = json.dumps(rows, ensure_ascii=False).encode()
    ends = [len(json.dumps(rows[: i + 1], ensure_ascii=False).encode()) - 1 for i in range(5)]
    cut = data.draw(st.integers(1, len(whole) - 1))
    path = tmp_path_factory.mktemp("cut") / "f.json"
    path.write_bytes(whole[:cut])
    report = ReadReport()
    assert [c.id for c in read_conversations(path, report)] == [
        r["id"] for r, end in zip(rows, ends, strict=True) if end <= cut
    ]
    assert report.truncated_at_byte is not None
    assert report.truncated_at_byte + report.num_truncated_bytes == cut


def test_a_cut_gzip_stream_gives_what_it_holds(tmp_path: Path) -> None:
    rows = [row(turns(("human", f"question {i}"), ("gpt", str(i**40))), f"r{i}_0") for i in range(2000)]
    zipped = gzip.compress(json.dumps(rows).encode())
    path = tmp_path / "f.json.gz"
    path.write_bytes(zipped[: len(zipped) // 2])
    pairs, report = read(path)
    assert 100 < len(pairs) < 2000
    assert report.truncated_at_byte is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"   \n", "is empty"),
        (b"hello", "expected a JSON array or JSON lines"),
        (
            b'[{"id": "a_0", "conversations": []}, {broken}, {"id": "b_0", "conversations": []}' + b" " * 50,
            "damaged after 1",
        ),
        (b"\x1f\x8bno gzip at all, whatever the magic says", "cannot be read"),
    ],
)
def test_what_is_no_such_file_says_so(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/nowhere/f.json", "is not a file: give"),
        ("package:no-such-package", "pip install no-such-package"),
        ("package:json", "not installed|holds 0 JSON files"),
        ("http://127.0.0.1:9/f.json", "cannot be read"),
    ],
)
def test_a_missing_source_names_the_cure(source: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        list(read_conversations(source))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join(10)


def test_a_url_is_streamed(tmp_path: Path, server: str) -> None:
    write(tmp_path / "f.json", [row(PAIR)] * 2)
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(json.dumps(row(PAIR)).encode()))
    assert len(list(read_conversations(f"{server}/f.json"))) == 2
    assert len(list(read_conversations(f"{server}/f.jsonl.gz"))) == 1
    with pytest.raises(ConfigurationError, match="404"):
        list(read_conversations(f"{server}/missing.json"))
