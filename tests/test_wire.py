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
    encode,
)

_TEXT = st.text(max_size=30)
_COUNT = st.integers(0, 2**53)
_TIME = st.floats(allow_nan=False, allow_infinity=False)
_KINDS = {
    "str": _TEXT,
    "int": _COUNT,
    "float": _TIME,
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
        ('{"type": "hello", "version": 1, "body": {}}', "version 1, this side speaks 2"),
        ('{"type": "hello", "version": true, "body": {}}', "version True"),
        ('{"type": "flip", "version": 2, "body": {}}', "type 'flip' is unknown; known: hello"),
        ('{"type": ["hello"], "version": 2, "body": {}}', "unknown"),
        ('{"type": "hello", "version": 2}', "hello is a NoneType, needs dict"),
        (_changed(role="both"), "hello.role is 'both'; known: prefill, decode"),
        (_changed(role_epoch=-1), "hello.role_epoch is -1, needs 0 or more"),
        (_changed(role_epoch=True), "hello.role_epoch is a bool, needs int"),
        (_changed(version=3), "hello.version is 3"),
        (_changed(colour="red"), "hello.colour is unknown"),
        ('{"type": "load_report", "version": 2, "body": {"load": {}, "sent_at_s": 1e999}}', "load_report.load.id"),
        ('{"type": "welcome", "version": 2, "body": {"gateway_id": NaN}}', "NaN is not a JSON number"),
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
