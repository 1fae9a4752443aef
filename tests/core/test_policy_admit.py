import random
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_plugin.core.admit import (
    ADMIT_POLICIES,
    ActiveDecode,
    DecodePool,
    Newcomer,
    can_ever_fit,
    fits_now,
    greedy,
    reserve_dynamic,
    reserve_peak,
    reserve_static,
    reserve_static_net,
)
from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import num_blocks

GOLDEN = yaml.safe_load((Path(__file__).parent / "golden" / "admission.yaml").read_text())


@pytest.mark.parametrize("policy", sorted(ADMIT_POLICIES))
@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_cases(case, policy):
    active = tuple(
        ActiveDecode(q["prompt"], q["out"], LengthRange(q["low"], q["high"]), q["held"]) for q in case["active"]
    )
    new = case["newcomer"]
    newcomer = Newcomer(new["prompt"], LengthRange(new["low"], new["high"]))
    pool = DecodePool(case["block_size"], case["total_blocks"], case["free_blocks"], active)
    assert ADMIT_POLICIES[policy](newcomer, pool) is case["expect"][policy]


def test_golden_cases_judge_every_policy():
    assert all(set(case["expect"]) == set(ADMIT_POLICIES) for case in GOLDEN)


# --- Against the definitions, written down as slowly as they read ---


@st.composite
def pools(draw):
    size = draw(st.sampled_from([1, 2, 16, 128]))
    active = []
    for _ in range(draw(st.integers(0, 6))):
        low = draw(st.integers(0, 30))
        high = low + draw(st.integers(1, 60))
        prompt, out = draw(st.integers(1, 80)), draw(st.integers(0, high + 3))
        active.append(ActiveDecode(prompt, out, LengthRange(low, high), num_blocks(prompt + out, size)))
    held = sum(q.num_held_blocks for q in active)
    total = held + draw(st.integers(0, 200 // size + 3))
    return DecodePool(size, total, total - held, tuple(active))


@st.composite
def newcomers(draw):
    low = draw(st.integers(0, 30))
    return Newcomer(draw(st.integers(1, 80)), LengthRange(low, low + draw(st.integers(1, 60))))


def left(q):
    return max(1, q.length_range.high_tokens - q.num_output_tokens)


def slow_dynamic(new, pool):
    def blocks(tokens):
        return num_blocks(tokens, pool.block_size_tokens)

    r = min(left(q) for q in pool.active)
    sums = []
    for s in (s for s in pool.active if left(s) == r):
        others = sum(blocks(q.num_prompt_tokens + q.num_output_tokens + r) for q in pool.active if q is not s)
        sums.append(others + blocks(new.num_prompt_tokens + min(r, new.length_range.high_tokens)))
    return max(sums) - new.num_cached_blocks <= pool.num_total_blocks


def slow_peak(new, pool):
    batch = [(left(q), q.num_prompt_tokens + q.num_output_tokens) for q in pool.active]
    batch.append((new.length_range.high_tokens, new.num_prompt_tokens))
    return all(
        sum(num_blocks(tokens + t, pool.block_size_tokens) for other, tokens in batch if other >= t)
        <= pool.num_total_blocks
        for t in {t for t, _ in batch}
    )


@settings(max_examples=500)
@given(newcomers(), pools())
def test_each_policy_is_its_own_inequality(new, pool):
    size, free, low = pool.block_size_tokens, pool.num_free_blocks, new.length_range.low_tokens
    lands = num_blocks(new.num_prompt_tokens, size) + 1 <= free
    assert fits_now(new, pool) is lands
    assert greedy(new, pool) is lands
    if not lands or not pool.active:
        assert {policy(new, pool) for policy in ADMIT_POLICIES.values()} == {lands}
        return
    at_low = num_blocks(new.num_prompt_tokens + low, size)
    growth = sum(
        max(0, num_blocks(q.num_prompt_tokens + q.length_range.low_tokens, size) - q.num_held_blocks)
        for q in pool.active
    )
    assert reserve_static(new, pool) is (at_low <= free)
    assert reserve_static_net(new, pool) is (at_low <= free - growth)
    assert reserve_dynamic(new, pool) is slow_dynamic(new, pool)
    assert reserve_peak(new, pool) is slow_peak(new, pool)


@given(newcomers(), pools(), st.randoms())
def test_the_order_of_the_batch_does_not_matter(new, pool, shuffler):
    shuffled = list(pool.active)
    shuffler.shuffle(shuffled)
    other = DecodePool(pool.block_size_tokens, pool.num_total_blocks, pool.num_free_blocks, tuple(shuffled))
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
