import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_policies import SLOW_POLICIES, expected_needs, longest, mean_needs, on_the_edge, share_alive

from serving_plugin.core.admit import (
    ADMIT_ORDERS,
    ADMIT_POLICIES,
    MAX_REFUSALS,
    ActiveDecode,
    Candidate,
    DecodePool,
    Newcomer,
    QueueRules,
    admit_queue,
    can_ever_fit,
    fits_now,
    greedy,
    reserve_dynamic,
    reserve_expected,
    reserve_peak,
    reserve_static,
    reserve_static_net,
)
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast, LengthRange
from serving_plugin.core.types import num_blocks

GOLDEN_RISK = 0.02
GOLDEN = yaml.safe_load((Path(__file__).parent / "golden" / "admission.yaml").read_text())


def golden_forecast(raw):
    found = raw.get("forecast")
    return None if found is None else LengthForecast(tuple(found["edges"]), tuple(found["probabilities"]))


def golden(case):
    active = tuple(
        ActiveDecode(q["prompt"], q["out"], LengthRange(q["low"], q["high"]), q["held"], golden_forecast(q))
        for q in case["active"]
    )
    new = case["newcomer"]
    newcomer = Newcomer(new["prompt"], LengthRange(new["low"], new["high"]), forecast=golden_forecast(new))
    return newcomer, DecodePool(case["block_size"], case["total_blocks"], case["free_blocks"], active, GOLDEN_RISK)


@pytest.mark.parametrize("policy", sorted(ADMIT_POLICIES))
@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_cases(case, policy):
    newcomer, pool = golden(case)
    assert ADMIT_POLICIES[policy](newcomer, pool) is case["expect"][policy]


def test_golden_cases_judge_every_policy():
    assert all(set(case["expect"]) == set(ADMIT_POLICIES) for case in GOLDEN)
    for policy in ADMIT_POLICIES:
        assert {case["expect"][policy] for case in GOLDEN} == {True, False}


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_verdicts_of_reserve_expected_are_what_counting_lengths_gives(case):
    newcomer, pool = golden(case)
    lands = num_blocks(newcomer.num_prompt_tokens, pool.block_size_tokens) + 1 <= pool.num_free_blocks
    fits = not pool.active or max(expected_needs(newcomer, pool)) <= pool.num_total_blocks
    assert case["expect"]["reserve_expected"] is (lands and fits)


# --- Against the definitions, written down as slowly as they read ---


@st.composite
def forecasts(draw):
    edges = sorted(draw(st.sets(st.integers(0, 90), min_size=2, max_size=6)))
    weights = draw(st.lists(st.integers(0, 9), min_size=len(edges) - 1, max_size=len(edges) - 1))
    return LengthForecast.from_weights(edges, weights if sum(weights) else [1] * len(weights))


@st.composite
def pools(draw):
    size = draw(st.sampled_from([1, 2, 16, 128]))
    active = []
    for _ in range(draw(st.integers(0, 6))):
        low = draw(st.integers(0, 30))
        high = low + draw(st.integers(1, 60))
        prompt, out = draw(st.integers(1, 80)), draw(st.integers(0, high + 3))
        forecast = draw(st.none() | forecasts())
        active.append(ActiveDecode(prompt, out, LengthRange(low, high), num_blocks(prompt + out, size), forecast))
    held = sum(q.num_held_blocks for q in active)
    total = held + draw(st.integers(0, 200 // size + 3))
    return DecodePool(size, total, total - held, tuple(active), draw(st.sampled_from([0.001, 0.02, 0.2, 0.45])))


@st.composite
def newcomers(draw):
    low = draw(st.integers(0, 30))
    length_range = LengthRange(low, low + draw(st.integers(1, 60)))
    prompt = draw(st.integers(1, 80))
    cached = draw(st.just(0) | st.integers(0, prompt // 16))  # no pool here has larger blocks
    return Newcomer(prompt, length_range, cached, draw(st.none() | forecasts()))


@settings(max_examples=500)
@given(newcomers(), pools())
def test_each_policy_is_its_own_inequality(new, pool):
    own_blocks = num_blocks(new.num_prompt_tokens, pool.block_size_tokens) - new.num_cached_blocks
    lands = own_blocks + 1 <= pool.num_free_blocks
    assert fits_now(new, pool) is lands
    assert greedy(new, pool) is lands
    if not lands or not pool.active:
        assert {policy(new, pool) for policy in ADMIT_POLICIES.values()} == {lands}
        return
    assume(not on_the_edge(new, pool))
    for name, policy in ADMIT_POLICIES.items():
        assert policy(new, pool) is SLOW_POLICIES[name](new, pool), name


@settings(max_examples=300)
@given(forecasts(), st.lists(st.integers(0, 120), max_size=12))
def test_survival_is_probability_over_for_many_lengths_at_once(forecast, lengths):
    lengths.sort()
    assert forecast.survival(lengths) == pytest.approx([forecast.probability_over(x) for x in lengths], abs=1e-9)


@given(newcomers(), pools(), st.integers(1, 50))
def test_more_blocks_and_more_risk_admit_no_less(new, pool, more):
    larger = replace(pool, num_total_blocks=pool.num_total_blocks + more, num_free_blocks=pool.num_free_blocks + more)
    for policy in (reserve_static, reserve_static_net, reserve_dynamic, reserve_peak, reserve_expected):
        assert policy(new, larger) or not policy(new, pool)
    bolder = replace(pool, overflow_probability=min(0.49, 2 * pool.overflow_probability))
    assert reserve_expected(new, bolder) or not reserve_expected(new, pool)


@st.composite
def certain_batches(draw):
    """Ranges of one length each, none of them outgrown: what reserve_expected weighs is certain."""
    size = draw(st.sampled_from([1, 4, 16]))

    def one_length():
        length = draw(st.integers(1, 60))
        return LengthRange(length, length + 1)

    active = []
    for _ in range(draw(st.integers(1, 6))):
        length_range, prompt = one_length(), draw(st.integers(1, 80))
        out = draw(st.integers(0, length_range.low_tokens - 1))
        active.append(ActiveDecode(prompt, out, length_range, num_blocks(prompt + out, size)))
    held = sum(q.num_held_blocks for q in active)
    total = held + draw(st.integers(0, 240 // size + 3))
    return Newcomer(draw(st.integers(1, 80)), one_length()), DecodePool(size, total, total - held, tuple(active))


@settings(max_examples=300)
@given(certain_batches())
def test_of_certain_lengths_reserve_expected_misses_no_peak(batch):
    new, pool = batch
    assume(reserve_expected(new, pool))
    everybody = [(q, q.num_output_tokens) for q in pool.active] + [(new, 0)]
    ends = [(q.length_range.low_tokens - out, q.num_prompt_tokens + out) for q, out in everybody]
    for t in range(1, max(end for end, _ in ends) + 1):
        in_use = sum(num_blocks(tokens + t, pool.block_size_tokens) for end, tokens in ends if end >= t)
        assert in_use <= pool.num_total_blocks
    # Ranges that end at the length itself: reserve_peak then looks at the same moments.
    at_low = [replace(q, length_range=LengthRange(0, q.length_range.low_tokens)) for q in pool.active]
    at_end = replace(new, length_range=LengthRange(0, new.length_range.low_tokens))
    assert reserve_peak(at_end, replace(pool, active=tuple(at_low)))


@settings(max_examples=150)
@given(newcomers(), pools())
def test_reserve_expected_admits_nothing_whose_mean_is_ever_more_than_the_pool(new, pool):
    assume(pool.active and reserve_expected(new, pool))
    assert max(mean_needs(new, pool)) <= pool.num_total_blocks + 1e-6


@pytest.mark.parametrize("size", [1, 8, 16, 48])
def test_reserve_expected_does_not_miss_the_peak_at_max_tokens(size):
    """Where a reply mostly reaches its limit, all that came together peak together, in the very last token."""
    forecast = LengthForecast((0, 20, 100, 101), (0.05, 0.08, 0.87))
    total = 900 // size
    pool = DecodePool(size, total, total, ())
    for _ in range(12):
        new = Newcomer(30, LengthRange(60, 101), forecast=forecast)
        if not reserve_expected(new, pool):
            break
        pool = pool.with_newcomer(new)
        needs = mean_needs(new, replace(pool, active=pool.active[:-1]))
        assert max(needs) <= total
    most = num_blocks(130, size)
    assert 0.87 * most * (len(pool.active) + 1) > 0.75 * total, "and is not far from full"
    assert reserve_peak(new, DecodePool(size, 10**4, 10**4, pool.active))


@settings(max_examples=300)
@given(newcomers(), pools(), st.sampled_from([1e-9, 0.001, 0.4]))
def test_reserve_expected_needs_no_more_than_all_at_their_longest(new, pool, risk):
    everybody = [(q, q.num_output_tokens) for q in pool.active] + [(new, 0)]
    most = sum(num_blocks(q.num_prompt_tokens + longest(q, out), pool.block_size_tokens) for q, out in everybody)
    pool = replace(pool, num_total_blocks=most, num_free_blocks=most, overflow_probability=risk)
    assert reserve_expected(new, pool) or not fits_now(new, pool)


@settings(max_examples=200)
@given(st.lists(newcomers(), min_size=1, max_size=4), pools())
def test_what_newcomers_add_to_the_expected_use_equals_what_is_worked_out_afresh(joining, pool):
    carried, use_before = pool, replace(pool.expected_use, means=list(pool.expected_use.means))
    for new in joining:
        carried = carried.with_newcomer(new)
        afresh = DecodePool(
            pool.block_size_tokens,
            pool.num_total_blocks,
            carried.num_free_blocks,
            carried.active,
            pool.overflow_probability,
        )
        assert "expected_use" in vars(carried) and "expected_use" not in vars(afresh)
        assert carried.expected_use == afresh.expected_use and carried == afresh
    assert pool.expected_use.means == use_before.means, "a pool stays as it was"
    assert "expected_use" not in vars(replace(pool).with_newcomer(joining[0])), "nobody asked for it"


def test_a_request_longer_than_its_forecast_gave_any_probability_is_not_forgotten():
    forecast = LengthForecast((10, 20, 501), (1.0, 0.0))
    pool = DecodePool(16, 40, 33, (ActiveDecode(80, 25, LengthRange(26, 501), 7, forecast),))
    assert share_alive(pool.active[0], 25, 100) > 0.7
    assert reserve_expected(Newcomer(16, LengthRange(2, 3)), pool)
    assert not reserve_expected(Newcomer(200, LengthRange(400, 401)), pool)


def test_reserve_expected_counts_on_a_batch_not_being_long_all_at_once():
    forecast = LengthForecast((10, 11, 500, 501), (0.9, 0.0, 0.1))
    active = tuple(ActiveDecode(16, 0, LengthRange(10, 501), 1, forecast) for _ in range(40))
    new = Newcomer(16, LengthRange(10, 501), forecast=forecast)
    pool = DecodePool(16, 300, 260, active, 0.02)
    assert reserve_expected(new, pool) and not reserve_peak(new, pool) and not reserve_dynamic(new, pool)
    assert not reserve_expected(new, replace(pool, overflow_probability=1e-6))


@given(newcomers(), pools(), st.randoms())
def test_the_order_of_the_batch_does_not_matter(new, pool, shuffler):
    shuffled = list(pool.active)
    shuffler.shuffle(shuffled)
    other = replace(pool, active=tuple(shuffled))
    for policy in ADMIT_POLICIES.values():
        assert policy(new, pool) is policy(new, other)


def test_blocks_found_in_the_prefix_cache_are_subtracted_once():
    pool = DecodePool(16, 100, 10, (ActiveDecode(1000, 0, LengthRange(0, 1), 90),))
    for cached, expected in ((0, False), (9, False), (10, True)):
        assert fits_now(Newcomer(16 * 19, LengthRange(0, 1), cached), pool) is expected
    static_pool = DecodePool(16, 100, 20, pool.active)
    assert not reserve_static(Newcomer(16 * 19, LengthRange(32, 48)), static_pool)
    assert reserve_static(Newcomer(16 * 19, LengthRange(32, 48), 1), static_pool)
    # In the look-ahead the shared blocks may be all that is left of the request they were shared with.
    sharing = DecodePool(16, 40, 30, (ActiveDecode(160, 0, LengthRange(0, 16), 10),))
    assert not reserve_peak(Newcomer(160, LengthRange(0, 16 * 31), 10), sharing)


# --- The promise of reserve_peak ---


@st.composite
def workloads(draw):
    size = draw(st.sampled_from([1, 4, 16]))
    total = draw(st.integers(4, 40))
    requests = []
    for _ in range(draw(st.integers(1, 25))):
        prompt = draw(st.integers(1, max(1, (total - 1) * size // 2)))
        max_tokens = draw(st.integers(1, max(1, total * size - prompt)))
        high = draw(st.integers(2, max_tokens + 1))
        low = draw(st.integers(0, high - 1))
        true = draw(st.integers(1, high - 1))
        if can_ever_fit(prompt, max_tokens, size, total):
            requests.append((prompt, low, high, true))
    return size, total, requests


def serve(policy, size, total, requests, gap=lambda: 0):
    """One token for each active request a step; returns the most blocks ever used and the number of requests served."""
    waiting, active, most, served, quiet = list(requests), [], 0, 0, 0
    while waiting or active:
        quiet = max(0, quiet - 1)
        while waiting and not quiet:
            prompt, low, high, _ = waiting[0]
            decodes = tuple(
                ActiveDecode(p, out, LengthRange(lo, hi), num_blocks(p + out, size)) for p, lo, hi, _, out in active
            )
            free = total - sum(q.num_held_blocks for q in decodes)
            if not policy(Newcomer(prompt, LengthRange(low, high)), DecodePool(size, total, free, decodes)):
                break
            active.append([*waiting.pop(0), 0])
            quiet = gap()
        assert active or quiet, "a request that fits an empty instance waits for ever"
        for request in active:
            request[4] += 1
        most = max(most, sum(num_blocks(p + out, size) for p, _, _, _, out in active))
        served += sum(out == true for _, _, _, true, out in active)
        active = [request for request in active if request[4] < request[3]]
    return most, served


@settings(max_examples=300)
@given(workloads(), st.randoms())
def test_a_batch_admitted_by_reserve_peak_never_overflows(workload, gaps):
    size, total, requests = workload
    most, served = serve(reserve_peak, size, total, requests, lambda: gaps.randint(0, 3))
    assert most <= total
    assert served == len(requests)


@settings(max_examples=200)
@given(workloads())
def test_reserve_peak_holds_at_the_very_limit_of_every_range(workload):
    size, total, requests = workload
    at_limit = [(prompt, low, high, high - 1) for prompt, low, high, _ in requests]
    most, served = serve(reserve_peak, size, total, at_limit)
    assert most <= total
    assert served == len(at_limit)


@pytest.mark.parametrize("policy", [greedy, reserve_static, reserve_static_net, reserve_dynamic])
def test_no_other_policy_makes_that_promise(policy):
    generator = random.Random(3)
    overflows = 0
    for _ in range(200):
        requests = [(generator.randint(1, 60), 0, high, high - 1) for high in generator.choices(range(2, 120), k=20)]
        overflows += serve(policy, 4, 60, requests)[0] > 60
    assert overflows > 0


def test_reserve_peak_lets_short_requests_into_the_gaps_that_long_ones_leave():
    long = ActiveDecode(100, 0, LengthRange(600, 800), 7)
    pool = DecodePool(16, 60, 53, (long,))
    assert reserve_peak(Newcomer(100, LengthRange(0, 200)), pool)  # gone long before the peak at 57 blocks
    assert not reserve_peak(Newcomer(100, LengthRange(600, 800)), pool)


def test_an_outgrown_range_counts_one_more_token():
    pool = DecodePool(16, 40, 20, (ActiveDecode(300, 20, LengthRange(0, 20), 20),))
    assert reserve_dynamic(Newcomer(100, LengthRange(0, 200)), pool)
    assert reserve_peak(Newcomer(100, LengthRange(0, 200)), pool)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"),
    [(100, 60, True), (100, 61, False), (144, 16, True), (145, 15, False), (160, 0, False), (1, 159, True)],
)
def test_can_ever_fit(prompt, max_tokens, expected):
    assert can_ever_fit(prompt, max_tokens, 16, 10) is expected


@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([1, 16, 32]), st.integers(1, 40))
def test_what_the_door_lets_in_an_empty_instance_admits(prompt, max_tokens, size, total):
    newcomer = Newcomer(prompt, LengthRange(0, max_tokens + 1))
    if can_ever_fit(prompt, max_tokens, size, total):
        assert all(policy(newcomer, DecodePool(size, total, total, ())) for policy in ADMIT_POLICIES.values())


def test_a_decision_over_256_active_requests_is_quick():
    generator = random.Random(0)
    active = tuple(
        ActiveDecode(
            generator.randint(1, 1000), generator.randint(0, 99), LengthRange(0, generator.randint(100, 900)), 1
        )
        for _ in range(256)
    )
    pool = DecodePool(16, 10**6, 10**6 - 256, active)  # everything fits, so every peak is looked at
    newcomer = Newcomer(100, LengthRange(0, 1000))
    fastest = 1.0
    for _ in range(20):
        start = time.perf_counter()
        assert reserve_peak(newcomer, pool)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 0.005  # about 0.2 ms on an idle core; a quadratic look-ahead takes tens


# --- Who of a queue is admitted ---

ONE_BLOCK = LengthRange(0, 1)
BUSY = ActiveDecode(16, 0, LengthRange(0, 16), 1)


def candidates(*prompt_tokens, **fields):
    return [Candidate(Newcomer(n, ONE_BLOCK), **fields) for n in prompt_tokens]


def refuse_all(newcomer, pool):
    return False


def test_an_empty_instance_admits_the_first_and_judges_the_others():
    pool = DecodePool(16, 10, 10, ())
    assert admit_queue(candidates(160, 16, 16), pool, refuse_all, QueueRules(8))[0] == [0]
    assert admit_queue(candidates(16, 16, 160), pool, greedy, QueueRules(8))[0] == [0, 1]
    assert admit_queue([], pool, greedy, QueueRules(8)) == ([], pool)


def test_each_is_judged_after_those_admitted_before_it():
    admitted, pool = admit_queue(candidates(*[16] * 9), DecodePool(16, 7, 6, (BUSY,)), greedy, QueueRules(8))
    assert admitted == [0, 1, 2, 3, 4]  # the sixth would leave no block to write into
    assert (pool.num_free_blocks, len(pool.active)) == (1, 6)


@pytest.mark.parametrize("num_seats", [0, 1, 3])
def test_no_more_are_admitted_than_there_are_seats(num_seats):
    for pool in (DecodePool(16, 90, 90, ()), DecodePool(16, 90, 89, (BUSY,))):
        assert len(admit_queue(candidates(*[16] * 9), pool, greedy, QueueRules(num_seats))[0]) == num_seats


def test_a_refused_request_is_overtaken_by_what_fits_if_the_rules_say_so():
    pool = DecodePool(16, 10, 9, (BUSY,))
    queue = candidates(16, 320, 16)
    for policy in (greedy, reserve_static):  # the policy itself has no say in it
        assert admit_queue(queue, pool, policy, QueueRules(8))[0] == [0, 2]
        assert admit_queue(queue, pool, policy, QueueRules(8, may_overtake=False))[0] == [0]


def test_without_overtaking_the_order_is_still_the_one_chosen():
    pool = DecodePool(16, 10, 9, (BUSY,))
    queue = [
        Candidate(Newcomer(n, ONE_BLOCK), expected) for n, expected in ((16, 50.0), (320, 30.0), (16, 10.0), (16, 40.0))
    ]
    rules = QueueRules(8, "shortest_expected", may_overtake=False)
    assert admit_queue(queue, pool, reserve_static, rules)[0] == [2]
    assert admit_queue(queue, pool, reserve_static, replace(rules, may_overtake=True))[0] == [2, 3, 0]


def test_without_overtaking_a_vetoed_request_is_admitted_in_its_time():
    pool = DecodePool(16, 10, 9, (BUSY,))
    rules = QueueRules(8, max_veto_s=10.0, may_overtake=False)
    assert admit_queue(candidates(16, 16, vetoed_s=9.0), pool, refuse_all, rules)[0] == []
    queue = [*candidates(16, vetoed_s=10.1), *candidates(16)]
    assert admit_queue(queue, pool, refuse_all, rules)[0] == [0]


def test_shortest_expected_goes_by_the_forecast_and_then_by_arrival():
    queue = [Candidate(Newcomer(16, ONE_BLOCK), expected) for expected in (50.0, 10.0, 90.0, 10.0)]
    pool = DecodePool(16, 90, 89, (BUSY,))
    assert admit_queue(queue, pool, reserve_static, QueueRules(3, "shortest_expected"))[0] == [1, 3, 0]
    assert admit_queue(queue, pool, reserve_static, QueueRules(3))[0] == [0, 1, 2]


def test_one_overtaken_often_enough_comes_first_and_nobody_passes_it():
    pool = DecodePool(16, 10, 9, (BUSY,))
    queue = [*candidates(16), *candidates(320, num_overtaken=5), *candidates(16)]
    assert admit_queue(queue, pool, reserve_static, QueueRules(8, max_overtaken=6))[0] == [0, 2]
    assert admit_queue(queue, pool, reserve_static, QueueRules(8, max_overtaken=5))[0] == []
    queue[1] = replace(queue[1], newcomer=Newcomer(16, ONE_BLOCK))
    assert admit_queue(queue, pool, reserve_static, QueueRules(8, max_overtaken=5))[0] == [1, 0, 2]


def test_the_limit_of_overtaking_holds_within_one_look_at_the_queue():
    pool = DecodePool(16, 40, 39, (BUSY,))
    queue = [*candidates(16 * 60, num_overtaken=1), *candidates(*[16] * 9)]
    assert admit_queue(queue, pool, reserve_static, QueueRules(30, max_overtaken=4))[0] == [1, 2, 3]


def test_after_its_veto_a_request_is_admitted_as_soon_as_its_prompt_fits():
    pool = DecodePool(16, 10, 9, (BUSY,))
    rules = QueueRules(8, max_veto_s=10.0)
    assert admit_queue(candidates(16, vetoed_s=10.0), pool, refuse_all, rules)[0] == []
    assert admit_queue(candidates(16, vetoed_s=10.1), pool, refuse_all, rules)[0] == [0]
    too_large = [*candidates(160, vetoed_s=10.1), *candidates(16)]
    assert admit_queue(too_large, pool, reserve_static, rules)[0] == []  # nobody passes it any more


def test_a_long_queue_is_judged_only_so_far():
    judged = []

    def remember(newcomer, pool):
        judged.append(newcomer)
        return False

    admit_queue(candidates(*[16] * 300), DecodePool(16, 10, 9, (BUSY,)), remember, QueueRules(8))
    assert len(judged) == MAX_REFUSALS


def test_an_unknown_order_is_refused():
    with pytest.raises(ConfigurationError, match=r"admit\.order='lifo' is unknown; known: arrival, shortest_expected"):
        admit_queue([], DecodePool(16, 10, 10, ()), greedy, QueueRules(8, "lifo"))


@dataclass
class Waiting:
    number: int
    prompt: int
    length_range: LengthRange
    true: int
    arrival: int
    out: int = 0
    num_overtaken: int = 0
    vetoed_since: int | None = None


def run_instance(policy, size, total, requests, rules):
    """A decode instance of `rules.num_seats` seats, one step a second, that preempts its last when it overflows.

    Checks each look at the queue; returns (the requests in the order of their first admission, most blocks in use).
    """
    coming, queue, active, returning, order, most = list(requests), [], [], [], [], 0
    last_step = max(r.arrival for r in requests) + sum(r.true for r in requests) + 1

    def held(r):
        return num_blocks(r.prompt + r.out, size)

    for now in range(last_step + 1):
        while coming and coming[0].arrival <= now:
            queue.append(coming.pop(0))
        while returning and sum(map(held, active)) + held(returning[0]) + 1 <= total:
            active.append(returning.pop(0))
        if not returning:
            decodes = tuple(ActiveDecode(r.prompt, r.out, r.length_range, held(r)) for r in active)
            pool = DecodePool(size, total, total - sum(map(held, active)), decodes)
            seats = rules.num_seats - len(active)
            seen = [
                Candidate(
                    Newcomer(r.prompt, r.length_range),
                    float(r.length_range.low_tokens),
                    r.num_overtaken,
                    0.0 if r.vetoed_since is None else now - r.vetoed_since,
                )
                for r in queue
            ]
            admitted, _ = admit_queue(seen, pool, policy, replace(rules, num_seats=seats))
            assert len(set(admitted)) == len(admitted) <= max(0, seats)
            assert admitted or active or not queue, "an empty instance admits somebody"
            if seats > 0 and seen and seen[0].vetoed_s > rules.max_veto_s and fits_now(seen[0].newcomer, pool):
                assert admitted[0] == 0, "the first in line, vetoed long enough, and its prompt fits"
            refused = [index for index in range(len(queue)) if index not in admitted]
            for index in refused:
                queue[index].num_overtaken += sum(later > index for later in admitted)
                assert queue[index].num_overtaken <= rules.max_overtaken
            if refused and len(admitted) < seats and queue[refused[0]].vetoed_since is None:
                queue[refused[0]].vetoed_since = now
            active += [queue[index] for index in admitted]
            order += [queue[index].number for index in admitted]
            queue = [queue[index] for index in refused]
        for r in active:
            r.out += 1
        while sum(map(held, active)) > total:
            returning.insert(0, active.pop())
            returning[0].out -= 1
        most = max(most, sum(map(held, active)))
        active = [r for r in active if r.out < r.true]
        if not (coming or queue or active or returning):
            return order, most
    raise AssertionError(f"{len(queue)} requests still wait after {last_step} steps")


@st.composite
def arrivals(draw):
    size, total, requests = draw(workloads())
    now, found = 0, []
    for number, (prompt, low, high, true) in enumerate(requests):
        now += draw(st.integers(0, 4))
        found.append(Waiting(number, prompt, LengthRange(low, high), true, now))
    assume(found)
    return size, total, found


@settings(max_examples=400)
@given(
    arrivals(),
    st.sampled_from([*ADMIT_POLICIES.values(), refuse_all, "coin"]),
    st.sampled_from(ADMIT_ORDERS),
    st.integers(1, 6),
    st.sampled_from([1.0, 5.0, 1e9]),
    st.integers(1, 5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_request_waits_for_ever(instance, policy, order, num_seats, max_veto_s, max_overtaken, may_overtake, coins):
    size, total, requests = instance
    if policy == "coin":

        def policy(newcomer, pool):
            return fits_now(newcomer, pool) and coins.random() < 0.5

    numbers = [r.number for r in requests]
    rules = QueueRules(num_seats, order, max_veto_s, max_overtaken, may_overtake)
    served, _ = run_instance(policy, size, total, requests, rules)
    assert sorted(served) == numbers
    if not may_overtake and order == "arrival":
        assert served == numbers


@settings(max_examples=200)
@given(arrivals(), st.sampled_from(ADMIT_ORDERS), st.integers(1, 5))
def test_reserve_peak_keeps_its_promise_in_whatever_order_a_queue_is_admitted(instance, order, max_overtaken):
    size, total, requests = instance
    _, most = run_instance(reserve_peak, size, total, requests, QueueRules(99, order, 1e9, max_overtaken))
    assert most <= total
    assert all(r.out == r.true for r in requests)
