"""Wire messages: whatever is encoded decodes to the same; whatever is malformed is one clear `WireError`."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.core.types import InstanceLoad, InstanceState, Role
from serving_plugin.wire import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Hello,
    LoadBroadcast,
    LoadReport,
    TransferReport,
    Welcome,
    WireError,
    decode,
    dispatch_ask,
    encode,
    prefill_ask,
)

_TEXT = st.text(max_size=30)
_COUNT = st.integers(0, 2**53)
_TIME = st.floats(allow_nan=False, allow_infinity=False)
_KINDS = {
    "str": _TEXT,
    "int": _COUNT,
    "float": _TIME,
    "bool": st.booleans(),
    "Role": st.sampled_from(Role),
    "InstanceState": st.sampled_from(InstanceState),
}
_LOADS = st.builds(InstanceLoad, **{f.name: _KINDS[f.type] for f in fields(InstanceLoad)})
_MESSAGES = st.one_of(
    st.builds(
        Hello,
        version=st.just(WIRE_VERSION),
        instance_id=_TEXT,
        incarnation=_TEXT,
        url=_TEXT,
        model=_TEXT,
        kv_fingerprint=_TEXT,
        role=st.sampled_from(Role),
        role_epoch=_COUNT,
        predictor=st.none() | _TEXT,
    ),
    st.builds(LoadReport, _LOADS, _TIME),
    st.builds(TransferReport, _TEXT, _TIME, _TIME, _COUNT),
    st.builds(
        LoadBroadcast,
        st.lists(_LOADS, max_size=3).map(tuple),
        st.dictionaries(_TEXT, _TEXT, max_size=3),
        _TIME,
        st.lists(_COUNT, max_size=3).map(tuple),
        st.booleans(),
    ),
    st.builds(Welcome, _TEXT),
)
HELLO = Hello(WIRE_VERSION, "p0", "a", "http://127.0.0.1:8100", "m", "fp", Role.PREFILL, 0, None)


@given(_MESSAGES)
def test_decode_is_the_inverse_of_encode(message):
    assert decode(encode(message)) == message


@given(st.text(max_size=200) | st.binary(max_size=50).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_a_message_or_a_wire_error(text):
    with pytest.raises(WireError):
        decode(text)


@given(_MESSAGES, st.data())
def test_a_damaged_message_is_a_wire_error(message, data):
    """Drop a key or give it a value of another type, anywhere in the body."""
    raw = json.loads(encode(message))
    target = raw["body"]["load"] if isinstance(message, LoadReport) and data.draw(st.booleans()) else raw["body"]
    key = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        del target[key]
    else:
        target[key] = [[None]]
    with pytest.raises(WireError, match=key):
        decode(json.dumps(raw))


def _changed(**changes):
    raw = json.loads(encode(HELLO))
    raw["body"].update(changes)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a JSON list, not an object"),
        ('{"type": "hello"}', "version None"),
        ('{"type": "hello", "version": 1, "body": {}}', "version 1, this side speaks 3"),
        ('{"type": "hello", "version": true, "body": {}}', "version True"),
        ('{"type": "flip", "version": 3, "body": {}}', "type 'flip' is unknown; known: hello"),
        ('{"type": ["hello"], "version": 3, "body": {}}', "unknown"),
        ('{"type": "hello", "version": 3}', "hello is a NoneType, needs dict"),
        (_changed(role="both"), "hello.role is 'both'; known: prefill, decode"),
        (_changed(role_epoch=-1), "hello.role_epoch is -1, needs 0 or more"),
        (_changed(role_epoch=2**63), "hello.role_epoch has over 64 bits"),
        (_changed(role_epoch=-(10**4000)), "hello.role_epoch has over 64 bits"),
        (_changed(role_epoch=True), "hello.role_epoch is a bool, needs int"),
        (_changed(version=4), "hello.version is 4"),
        (_changed(colour="red"), "hello.colour is unknown"),
        ('{"type": "load_report", "version": 3, "body": {"load": {}, "sent_at_s": 1e999}}', "load_report.load.id"),
        ('{"type": "welcome", "version": 3, "body": {"gateway_id": NaN}}', "NaN is not a JSON number"),
    ],
)
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(WireError, match=r"^[^\n]*$") as caught:
        decode(text)
    assert words in str(caught.value)


def test_size_is_bounded_both_ways():
    with pytest.raises(WireError, match=f"limit {MAX_MESSAGE_BYTES}"):
        encode(Welcome("g" * MAX_MESSAGE_BYTES))
    with pytest.raises(WireError, match=f"limit {MAX_MESSAGE_BYTES}"):
        decode("é" * (MAX_MESSAGE_BYTES // 2 + 1))


def test_a_number_that_json_lacks_is_not_sent():
    with pytest.raises(WireError, match="load_broadcast"):
        encode(LoadBroadcast((), {}, float("nan")))


# What a gateway sends with its requests

DECISION = {
    "request_id": "r1",
    "num_prompt_tokens": 7,
    "max_tokens": 50,
    "length_range": [0, 200],
    "is_heavy_decode": False,
}


def _without(name):
    return {key: value for key, value in DECISION.items() if key != name}


def test_what_a_gateway_asks_is_read_and_the_rest_left_alone():
    ask = dispatch_ask({"tetri": {**DECISION, "times": {}, "exclude": 3}, "exclude": ["d0"], "more": 1})
    assert (ask.request_id, ask.num_prompt_tokens, ask.max_tokens, ask.is_heavy_decode) == ("r1", 7, 50, False)
    assert (ask.length_range, ask.exclude) == ((0, 200), ("d0",))
    assert dispatch_ask({"tetri": DECISION}).exclude == ()
    assert prefill_ask({"request_id": "r1", "more": 1}).max_tokens is None
    asked = prefill_ask({"request_id": "r1", "max_tokens": 5, "arrival_s": 2, "exclude": ["d0"]})
    assert (asked.max_tokens, asked.arrival_s, asked.exclude) == (5, 2.0, ("d0",))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, "the body is a NoneType, needs dict"),
        ([DECISION], "the body is a list, needs dict"),
        ({}, "tetri is a NoneType, needs dict"),
        ({"tetri": None}, "tetri is a NoneType, needs dict"),
        ({"tetri": 1}, "tetri is a int, needs dict"),
        *(({"tetri": _without(name)}, f"tetri.{name} is missing") for name in DECISION),
        ({"tetri": {**DECISION, "num_prompt_tokens": "7"}}, "tetri.num_prompt_tokens is a str, needs int"),
        ({"tetri": {**DECISION, "num_prompt_tokens": 2**64}}, "tetri.num_prompt_tokens has over 64 bits"),
        ({"tetri": {**DECISION, "max_tokens": -1}}, "tetri.max_tokens is -1, needs 0 or more"),
        ({"tetri": {**DECISION, "max_tokens": None}}, "tetri.max_tokens is a NoneType"),
        ({"tetri": {**DECISION, "is_heavy_decode": 1}}, "tetri.is_heavy_decode is a int, needs bool"),
        ({"tetri": {**DECISION, "length_range": [5, 1]}}, "tetri.length_range is [5, 1], needs [low, high]"),
        ({"tetri": {**DECISION, "length_range": [5, 5]}}, "tetri.length_range is [5, 5], needs [low, high]"),
        ({"tetri": {**DECISION, "length_range": [0, 1, 2]}}, "tetri.length_range is [0, 1, 2], needs"),
        ({"tetri": {**DECISION, "length_range": []}}, "tetri.length_range is [], needs"),
        ({"tetri": {**DECISION, "length_range": [0, 1.5]}}, "tetri.length_range[1] is a float, needs int"),
        ({"tetri": {**DECISION, "length_range": {"low": 0}}}, "tetri.length_range is a dict, needs list"),
        ({"tetri": DECISION, "exclude": "d0"}, "exclude is a str, needs list"),
        ({"tetri": DECISION, "exclude": [1]}, "exclude[0] is a int, needs str"),
    ],
)
def test_what_no_gateway_asks_is_named(body, words):
    with pytest.raises(WireError, match=r"^[^\n]*$") as caught:
        dispatch_ask(body)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("tetri", "words"),
    [
        (None, "tetri is a NoneType"),
        ({}, "tetri.request_id is missing"),
        ({"request_id": 1}, "tetri.request_id is a int, needs str"),
        ({"request_id": "r1", "max_tokens": "50"}, "tetri.max_tokens is a str, needs int"),
        ({"request_id": "r1", "arrival_s": float("inf")}, "tetri.arrival_s is not a finite number"),
        ({"request_id": "r1", "exclude": 3}, "tetri.exclude is a int, needs list"),
    ],
)
def test_a_prefill_leg_that_no_gateway_sends_is_named(tetri, words):
    with pytest.raises(WireError, match=words):
        prefill_ask(tetri)
