import pytest
from core_samples import load, request
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.core.place import least_load
from serving_plugin.core.types import InstanceState, Role

P = Role.PREFILL


@pytest.mark.parametrize(
    ("loads", "sent", "expected"),
    [
        ([], {}, None),
        ([load("d")], {}, None),
        ([load("b", P), load("a", P)], {}, "a"),
        ([load("a", P, num_waiting_prompt_tokens=10), load("b", P, num_waiting_prompt_tokens=9)], {}, "b"),
        ([load("a", P), load("b", P, num_waiting_prompt_tokens=9)], {"a": 10}, "b"),
        ([load("a", P), load("b", P, num_waiting_prompt_tokens=9)], {"a": 9}, "a"),
        ([load("a", P, state=InstanceState.DRAINING), load("b", P, num_waiting_prompt_tokens=999)], {}, "b"),
        ([load("a", P, state=InstanceState.LOST)], {}, None),
        ([load("a", P, state=InstanceState.STARTING)], {}, None),
        ([load("a", P, is_over_pinned_budget=True), load("b", P, num_waiting_prompt_tokens=999)], {}, "b"),
        ([load("a", P, num_pinned_blocks=99)], {}, "a"),  # the instance itself knows its budget
        ([load("a", P, is_over_pinned_budget=True), load("b", P, is_over_pinned_budget=True)], {}, None),
    ],
)
def test_least_load(loads, sent, expected):
    assert least_load(request(), loads, sent) == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6), st.randoms())
def test_least_load_is_the_minimum_in_whatever_order_reports_came(waiting_and_sent, shuffler):
    loads = [load(f"p{i}", P, num_waiting_prompt_tokens=w) for i, (w, _) in enumerate(waiting_and_sent)]
    sent = {f"p{i}": s for i, (_, s) in enumerate(waiting_and_sent)}
    shuffler.shuffle(loads)
    totals = {f"p{i}": w + s for i, (w, s) in enumerate(waiting_and_sent)}
    assert least_load(request(), loads, sent) == min(totals, key=lambda id: (totals[id], id))
