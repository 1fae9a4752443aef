from dataclasses import FrozenInstanceError, asdict

import pytest
from core_samples import load
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.core import errors
from serving_plugin.core.types import Outcome, RequestRecord, Role, num_blocks


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_blocks_hold_the_tokens_and_not_a_block_more(tokens, size):
    blocks = num_blocks(tokens, size)
    assert blocks * size >= tokens > (blocks - 1) * size


def test_active_counts_running_and_loading():
    assert load("d", num_running=3, num_loading=2, num_waiting=7).num_active == 5


def test_nouns_are_frozen_and_turn_into_plain_values():
    record = RequestRecord("r", 1.0, 10, 5, Outcome.OK)
    with pytest.raises(FrozenInstanceError):
        record.id = "other"
    assert asdict(record)["outcome"] == "ok"
    assert load("p", Role.PREFILL).role == "prefill"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.ConfigurationError, 400),
        (errors.BadRequestError, 400),
        (errors.OverloadedError, 429),
        (errors.NoInstanceError, 503),
        (errors.LostInstanceError, 502),
        (errors.TransferFailedError, 502),
    ],
)
def test_every_error_is_one_tree_with_a_status(kind, status):
    assert issubclass(kind, errors.TetriError)
    assert kind.http_status == status
    assert kind("one line").openai_type
