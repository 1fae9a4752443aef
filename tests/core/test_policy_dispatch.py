import random
from collections import Counter
from dataclasses import replace

import pytest
from core_samples import load, request
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.core.dispatch import (
    DISPATCH_POLICIES,
    Promise,
    imbalance,
    least_load,
    power_of_two,
    power_of_two_by_class,
    promise_for,
    random_choice,
    room_blocks,
)
from serving_plugin.core.types import InstanceState, Role


def rng():
    return random.Random(7)


@pytest.mark.parametrize("policy", DISPATCH_POLICIES.values())
def test_only_ready_decode_instances_count(policy):
    unfit = [
        load("p", Role.PREFILL),
        load("s", state=InstanceState.STARTING),
        load("x", state=InstanceState.DRAINING),
        load("l", state=InstanceState.LOST),
    ]
    assert policy(request(), [], {}, rng()) is None
    assert policy(request(), unfit, {}, rng()) is None
    assert policy(request(), [*unfit, load("d", num_free_blocks=0)], {}, rng()) == "d"


def test_a_promise_is_the_request_at_its_longest():
    assert promise_for(request(prompt=100, high=200, heavy=False), 16) == Promise(19, 0, 1)
    assert promise_for(request(prompt=1, high=16, heavy=True), 16) == Promise(2, 1, 0)
    assert promise_for(request(heavy=True), 16) + promise_for(request(heavy=False), 16) == Promise(38, 1, 1)


def test_room_excludes_promised_and_vetoed_blocks():
    assert room_blocks(load("d", num_free_blocks=50, num_vetoed_tokens=33), Promise(10)) == 50 - 10 - 3
    assert room_blocks(load("d", num_free_blocks=5), Promise(10)) == -5


@pytest.mark.parametrize(
    ("heavy", "loads", "promised", "expected"),
    [
        # Taking the request: (1+1+1)/(0+1) on a, (0+1+1)/(0+1) on b.
        (True, [load("a", num_heavy_decodes=1), load("b")], {}, "b"),
        # Light: (4+1)/(1+1) against (1+1)/(0+1+1): the second.
        (False, [load("a", num_heavy_decodes=4), load("b", num_heavy_decodes=1)], {}, "b"),
        # The request itself tips the scale: 2/1 against 5/3 with it, 1/1 against 4/3 without.
        (True, [load("a"), load("b", num_heavy_decodes=3, num_light_decodes=2)], {}, "b"),
        # So does a light one: 3/2 against 5/3 with it, 3/1 against 5/2 without.
        (False, [load("a", num_heavy_decodes=2), load("b", num_heavy_decodes=4, num_light_decodes=1)], {}, "a"),
        # More light company lowers the ratio.
        (True, [load("a", num_light_decodes=1), load("b", num_light_decodes=2)], {}, "b"),
        # What was promised since the last report counts.
        (True, [load("a"), load("b", num_heavy_decodes=1)], {"a": Promise(0, 2, 0)}, "b"),
        # Equal ratios: more room, then id.
        (True, [load("a", num_free_blocks=60), load("b", num_free_blocks=61)], {}, "b"),
        (True, [load("a", num_free_blocks=60), load("b", num_free_blocks=61)], {"b": Promise(2)}, "a"),
        (True, [load("b"), load("a")], {}, "a"),
        # Only one holds blocks(100 + 200) = 19: it is taken whatever the ratio.
        (True, [load("a", num_free_blocks=18), load("b", num_free_blocks=19, num_heavy_decodes=9)], {}, "b"),
        (True, [load("a", num_free_blocks=20), load("b", num_heavy_decodes=9)], {"a": Promise(2)}, "b"),
        (True, [load("a", num_free_blocks=20, num_vetoed_tokens=17), load("b", num_heavy_decodes=9)], {}, "b"),
        # None holds it: room alone decides.
        (True, [load("a", num_free_blocks=18, num_heavy_decodes=9), load("b", num_free_blocks=17)], {}, "a"),
        (True, [load("b", num_free_blocks=17), load("a", num_free_blocks=17)], {}, "a"),
    ],
)
def test_power_of_two(heavy, loads, promised, expected):
    assert power_of_two(request(heavy=heavy), loads, promised, rng()) == expected


@pytest.mark.parametrize(
    ("heavy", "loads", "promised", "expected"),
    [
        # Own class alone counts.
        (True, [load("a", num_heavy_decodes=1), load("b", num_light_decodes=9)], {}, "b"),
        (False, [load("a", num_heavy_decodes=9), load("b", num_light_decodes=1)], {}, "a"),
        # What was promised since the last report counts.
        (True, [load("a"), load("b", num_heavy_decodes=1)], {"a": Promise(0, 2, 0)}, "b"),
        # As many of its class: more room, then id.
        (True, [load("a", num_free_blocks=60), load("b", num_free_blocks=61)], {}, "b"),
        (True, [load("b"), load("a")], {}, "a"),
        # Only one holds blocks(100 + 200) = 19; none does: room alone decides.
        (True, [load("a", num_free_blocks=18), load("b", num_free_blocks=19, num_heavy_decodes=9)], {}, "b"),
        (True, [load("a", num_free_blocks=18, num_heavy_decodes=9), load("b", num_free_blocks=17)], {}, "a"),
    ],
)
def test_power_of_two_by_class(heavy, loads, promised, expected):
    assert power_of_two_by_class(request(heavy=heavy), loads, promised, rng()) == expected


@pytest.mark.parametrize("num_instances", [2, 3, 8])
def test_by_class_spreads_a_burst_where_the_ratio_piles_it_up(num_instances):
    """Room for everybody everywhere: nothing but the policy keeps the requests apart."""

    def most_over_mean(policy, seed):
        loads, promised = [load(f"d{i}", num_free_blocks=10_000) for i in range(num_instances)], {}
        generator, tokens = random.Random(seed), Counter()
        for _ in range(32 * num_instances):
            heavy = generator.random() < 0.5
            one = request(prompt=20, low=200 if heavy else 0, high=600 if heavy else 100, heavy=heavy)
            chosen = policy(one, loads, promised, generator)
            promised[chosen] = promised.get(chosen, Promise()) + promise_for(one, 16)
            tokens[chosen] += one.length_range.high_tokens
        return max(tokens.values()) * num_instances / sum(tokens.values())

    by_class = [most_over_mean(power_of_two_by_class, seed) for seed in range(10)]
    by_ratio = [most_over_mean(power_of_two, seed) for seed in range(10)]
    assert max(by_class) < 1.25 < sum(by_ratio) / len(by_ratio)


def test_power_of_two_looks_at_two_only():
    loads = [load(f"d{i}", num_heavy_decodes=i) for i in range(8)]
    drawn = Counter(power_of_two(request(heavy=True), loads, {}, random.Random(seed)) for seed in range(400))
    assert "d7" not in drawn  # the worst of all loses every pair
    assert drawn["d0"] < 200  # the best is drawn in a quarter of the pairs only
    assert {"d0", "d5"} <= set(drawn)


def test_the_order_of_reports_does_not_change_a_seeded_draw():
    loads = [load(f"d{i}", num_free_blocks=40 + i) for i in range(9)]
    for policy in DISPATCH_POLICIES.values():
        assert policy(request(), loads, {}, rng()) == policy(request(), loads[::-1], {}, rng())


def test_random_is_uniform_over_ready_ones():
    loads = [load("a", num_free_blocks=0), load("b"), load("c", state=InstanceState.DRAINING)]
    generator = rng()
    drawn = Counter(random_choice(request(), loads, {}, generator) for _ in range(1000))
    assert set(drawn) == {"a", "b"}
    assert 400 < drawn["a"] < 600


def test_imbalance_piles_heavy_requests_on_the_first_and_rotates_light_ones_over_the_rest():
    loads = [load(id) for id in "cab"]
    assert {imbalance(request(heavy=True), loads, {"a": Promise(99, 9, 0)}, rng()) for _ in range(5)} == {"a"}
    promised, taken = {}, []
    for _ in range(4):
        chosen = imbalance(request(heavy=False), loads, promised, rng())
        taken.append(chosen)
        promised[chosen] = promised.get(chosen, Promise()) + promise_for(request(heavy=False), 16)
    assert taken == ["b", "c", "b", "c"]
    reported = [replace(x, num_light_decodes=1) if x.id == "b" else x for x in loads]
    assert imbalance(request(heavy=False), reported, {}, rng()) == "c"


def test_least_load_takes_most_room_then_id():
    loads = [load("b", num_free_blocks=50), load("a", num_free_blocks=50), load("c", num_free_blocks=60)]
    assert least_load(request(), loads, {}, rng()) == "c"
    assert least_load(request(), loads, {"c": Promise(11)}, rng()) == "a"


@pytest.mark.parametrize("policy", [power_of_two, power_of_two_by_class, imbalance])
def test_a_request_without_a_class_is_a_mistake(policy):
    with pytest.raises(ValueError, match="class"):
        policy(request(heavy=None), [load("d")], {}, rng())


def test_a_request_without_a_range_is_a_mistake():
    with pytest.raises(ValueError, match="length range"):
        power_of_two(replace(request(), length_range=None), [load("d")], {}, rng())


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 1000),
)
def test_power_of_two_prefers_room_for_the_longest_case(states, heavy, seed):
    loads = [
        load(f"d{i}", num_free_blocks=f, num_heavy_decodes=h, num_light_decodes=n) for i, (f, h, n) in enumerate(states)
    ]
    chosen = power_of_two(request(heavy=heavy), loads, {}, random.Random(seed))
    roomy = {x.id for x in loads if x.num_free_blocks >= 19}
    assert chosen in (roomy or {x.id for x in loads})


def test_two_choices_spread_heavy_decodes_better_than_one():
    def spread(policy):
        generator, promised = random.Random(1), {}
        loads = [load(f"d{i}", num_free_blocks=10**6) for i in range(8)]
        for _ in range(200):
            chosen = policy(request(heavy=True), loads, promised, generator)
            promised[chosen] = promised.get(chosen, Promise()) + promise_for(request(heavy=True), 16)
        counts = [promised.get(x.id, Promise()).num_heavy for x in loads]
        return max(counts) - min(counts)

    assert spread(power_of_two) < spread(random_choice) < spread(imbalance)
