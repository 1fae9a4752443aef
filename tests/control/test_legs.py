"""Bodies of the legs, P's answer, and the event meter: pure functions, tables and properties."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.control.legs import (
    client_max_tokens,
    decode_body,
    estimate_prompt_tokens,
    parse_prefill_answer,
    prefill_body,
    strip_client_body,
    unchecked_field,
)
from serving_plugin.control.request_table import Phase, RequestTable
from serving_plugin.control.sse import EventMeter
from serving_plugin.core.errors import TransferFailedError
from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import Outcome

FULL = {
    "model": "m",
    "prompt": "hi",
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 9,
    "min_tokens": 3,
    "stop": ["x"],
    "stop_token_ids": [1],
    "logprobs": 2,
    "seed": 1,
    "ignore_eos": False,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "guided_regex": "a+",
}


def test_the_prefill_leg_asks_for_one_token_and_nothing_that_only_decoding_means():
    leg = prefill_body(FULL, False, "r1", 12.5)
    params = leg.pop("kv_transfer_params")
    assert leg == {
        "model": "m",
        "prompt": "hi",
        "temperature": 0.5,
        "stream": False,
        "ignore_eos": True,
        "max_tokens": 1,
    }
    assert params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "tetri": {"request_id": "r1", "max_tokens": 9, "arrival_s": 12.5},
    }


def test_the_prefill_leg_of_a_chat():
    body = {"messages": [], "max_completion_tokens": 5, "tools": [{}], "tool_choice": "required", "top_logprobs": 1}
    leg = prefill_body(body, True, "r1", 0.0)
    assert (leg["max_tokens"], leg["max_completion_tokens"], leg["tool_choice"]) == (1, 1, "none")
    assert "top_logprobs" not in leg and leg["tools"] == [{}]
    assert leg["kv_transfer_params"]["tetri"]["max_tokens"] == 5
    assert "tool_choice" not in prefill_body({"messages": []}, True, "r1", 0.0)


def test_the_decode_leg_is_the_clients_body_with_ps_answer_and_since_when_it_queues():
    params = {"remote_host": "h", "tetri": {"decode_id": "d0"}}
    sent = {"remote_host": "h", "tetri": {"decode_id": "d0", "queued_since_s": 12.5}}
    assert decode_body(FULL, params, 12.5) == {**FULL, "kv_transfer_params": sent}
    assert params["tetri"] == {"decode_id": "d0"}


def test_bodies_are_not_changed_in_place():
    body = {**FULL, "kv_transfer_params": {}, "vllm_xargs": {"tetri_x": 1, "mine": 2}}
    before = json.dumps(body)
    prefill_body(decode_body(strip_client_body(body), {"tetri": {}}, 1.0), False, "r", 0.0)
    assert json.dumps(body) == before


@pytest.mark.parametrize(
    ("xargs", "left"),
    [({"tetri_a": 1, "b": 2}, {"b": 2}), ({"kv_transfer_params": "x"}, {}), (None, None), ("odd", "odd")],
)
def test_reserved_xargs_are_stripped(xargs, left):
    clean = strip_client_body({"vllm_xargs": xargs, "kv_transfer_params": {}, "ec_transfer_params": {}, "prompt": "x"})
    assert clean == {"vllm_xargs": left, "prompt": "x"}


@pytest.mark.parametrize(
    ("body", "is_chat", "limit"),
    [
        ({}, False, 16),  # vLLM's default for completions
        ({"max_tokens": None}, False, None),
        ({"max_tokens": 5}, False, 5),
        ({}, True, None),
        ({"max_tokens": 5}, True, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, True, 6),
    ],
)
def test_the_limit_that_a_body_implies(body, is_chat, limit):
    assert client_max_tokens(body, is_chat) == limit


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (FULL, None),
        ({"max_tokens": None, "stop": "x", "logprobs": True}, None),
        ({"max_tokens": 1.5}, "odd_max_tokens"),
        ({"max_tokens": True}, "odd_max_tokens"),
        ({"max_completion_tokens": 0}, "odd_max_completion_tokens"),
        ({"seed": "x"}, "odd_seed"),
        ({"stop": 3}, "odd_stop"),
        ({"response_format": "json"}, "odd_response_format"),
    ],
)
def test_odd_fields_that_p_would_never_see_are_named(body, reason):
    assert unchecked_field(body) == reason


@pytest.mark.parametrize(
    ("body", "is_chat", "num_tokens"),
    [
        ({"prompt": "x" * 40}, False, 10),
        ({"prompt": ""}, False, 1),
        ({"prompt": [1, 2, 3]}, False, 3),
        ({"prompt": [[1, 2], [3]]}, False, 3),
        ({"prompt": ["x" * 40, "y" * 8]}, False, 12),
        ({"prompt": {"odd": 1}}, False, 1),
        ({"messages": "odd"}, True, 1),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, True, 108),
    ],
)
def test_prompt_length_is_estimated_for_placement(body, is_chat, num_tokens):
    assert estimate_prompt_tokens(body, is_chat) == num_tokens


def test_ps_answer_is_read():
    tetri = {
        "decode_id": "d0",
        "decode_url": "http://d0",
        "length_range": [0, 200],
        "num_prompt_tokens": 7,
        "times": {"prefill_start_s": 1, "dispatch_s": None},
    }
    answer = parse_prefill_answer(json.dumps({"kv_transfer_params": {"x": 1, "tetri": tetri}}).encode(), "p0")
    assert (answer.decode_id, answer.decode_url, answer.num_prompt_tokens) == ("d0", "http://d0", 7)
    assert (answer.length_range, answer.times_s) == (LengthRange(0, 200), {"prefill_start_s": 1.0})
    assert answer.kv_transfer_params["x"] == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": {"tetri": {"length_range": [5, 1]}}}',
        b'{"kv_transfer_params": {"tetri": {"times": {"dispatch_s": "x"}}}}',
    ],
)
def test_an_unusable_answer_names_the_instance_and_the_cure(raw):
    with pytest.raises(TransferFailedError, match=r"prefill instance p0 .*VLLM_PLUGINS=tetri"):
        parse_prefill_answer(raw, "p0")


STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"say \\"usage\\":{ or \\"choices\\":[{"}}]}\n\n'
    b": comment\n\n"
    b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_the_meter_counts_the_same_however_the_stream_is_cut(cuts):
    meter, edges = EventMeter(), [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    passed = [meter.feed(piece) for piece in pieces]
    assert b"".join(passed) + meter.rest() == STREAM
    assert all(piece == b"" or piece.endswith(b"\n\n") for piece in passed)
    assert (meter.num_output_tokens, meter.done, meter.error) == (2, True, None)


def test_usage_beats_counting():
    meter = EventMeter()
    meter.feed(b'data: {"choices":[{"text":"abc"}],"usage":{"prompt_tokens":4,"completion_tokens":1}}\n\n')
    meter.feed(b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\n')
    assert (meter.num_output_tokens, meter.num_prompt_tokens) == (3, 4)


def test_an_error_event_is_kept_and_a_cut_one_is_held_back():
    meter = EventMeter()
    assert meter.feed(b'data: {"error":{"message":"died"}}\n\ndata: {"cho') == b'data: {"error":{"message":"died"}}\n\n'
    assert (meter.error, meter.done) == ("died", False)


def test_what_is_held_back_is_bounded():
    meter = EventMeter()
    assert len(meter.feed(b"x" * (2 << 20))) == 2 << 20


def test_the_table_keeps_ids_apart_and_a_bounded_history():
    table = RequestTable(history_size=2)
    first, twin, nameless = table.open("r", 1.0), table.open("r", 2.0), table.open(None, 3.0)
    assert first.id == "r" and twin.id.startswith("r-") and len(nameless.id) == 32
    first.phase = Phase.DECODE
    assert table.phases() == {"arrived": 2, "prefill": 0, "decode": 1, "whole": 0}
    records = [table.close(row, Outcome.OK) for row in (first, twin, nameless)]
    assert len(table) == 0
    assert table.records(10) == records[1:]
    assert table.records(1) == records[2:] and table.records(0) == []
    assert table.open("r", 4.0).id == "r"


def test_transfers_are_noted_while_open_and_after():
    table = RequestTable(history_size=2)
    row = table.open("r", 1.0)
    assert table.set_transfer("r", 2.0, 3.0) and not table.set_transfer("x", 2.0, 3.0)
    assert table.close(row, Outcome.OK).transfer_end_s == 3.0
    table.close(table.open("s", 1.0), Outcome.OK)
    assert table.set_transfer("r", 4.0, 5.0)
    assert [record.transfer_start_s for record in table.records(2)] == [4.0, None]


def test_only_requests_that_ended_well_make_history():
    table = RequestTable(history_size=2)
    for outcome, num_tokens in ((Outcome.OK, 5), (Outcome.CANCELLED, 6), (Outcome.OK, 0), (Outcome.OK, 7)):
        row = table.open(None, 0.0)
        row.num_output_tokens = num_tokens
        table.close(row, outcome)
    assert list(table.recent_lengths_tokens) == [5, 7]
