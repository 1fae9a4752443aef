"""The policies on states of vLLM's real scheduler, recorded by `python tests/engine/record_states.py`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from slow_policies import SLOW_POLICIES, on_the_edge, slow_landing

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
)
from serving_plugin.core.forecast import LengthForecast, LengthRange
from serving_plugin.core.types import num_blocks

RECORDED = json.loads((Path(__file__).parent / "recorded" / "scheduler_states.json").read_text())
STATES = RECORDED["states"]


def forecast(probabilities):
    return None if probabilities is None else LengthForecast(tuple(RECORDED["edges_tokens"]), tuple(probabilities))


def read(state):
    """(queue, pool, rules) of a recorded state."""
    active = tuple(
        ActiveDecode(prompt, out, LengthRange(low, high), held, forecast(probabilities))
        for prompt, out, low, high, held, probabilities in state["active"]
    )
    pool = DecodePool(RECORDED["block_size_tokens"], RECORDED["total_blocks"], state["free_blocks"], active, 0.02)
    queue = [
        Candidate(Newcomer(prompt, LengthRange(low, high), 0, forecast(probabilities)), expected, overtaken, vetoed_s)
        for prompt, low, high, probabilities, expected, overtaken, vetoed_s in state["queue"]
    ]
    return queue, pool, QueueRules(state["num_seats"], "arrival", RECORDED["max_veto_s"], RECORDED["max_overtaken"])


def test_the_record_is_of_a_busy_instance():
    assert len(STATES) >= 55
    assert sum(bool(state["admitted"]) for state in STATES) >= 15
    assert sum(len(state["admitted"]) < len(state["queue"]) for state in STATES) >= 30
    assert max(len(state["queue"]) for state in STATES) >= 15
    queues, pools, _ = zip(*map(read, STATES), strict=True)
    assert any(candidate.vetoed_s > RECORDED["max_veto_s"] for queue in queues for candidate in queue)
    assert any(candidate.num_overtaken for queue in queues for candidate in queue)
    assert any(pool.num_free_blocks < 3 for pool in pools)


def test_recorded_pools_add_up():
    for _, pool, rules in map(read, STATES):
        held = sum(q.num_held_blocks for q in pool.active)
        assert held + pool.num_free_blocks == pool.num_total_blocks
        assert len(pool.active) + rules.num_seats == 8
        for q in pool.active:
            size = pool.block_size_tokens
            # A token that was just put out, or is being, may not have its block yet.
            assert num_blocks(q.num_prompt_tokens + q.num_output_tokens, size) - q.num_held_blocks in (0, 1)
            assert q.num_output_tokens < q.length_range.high_tokens


@pytest.mark.parametrize("state", STATES, ids=[str(state["step"]) for state in STATES])
def test_core_alone_gives_the_recorded_decision(state):
    queue, pool, rules = read(state)
    admitted, after = admit_queue(queue, pool, ADMIT_POLICIES[RECORDED["policy"]], rules)
    assert admitted == state["admitted"]
    assert len(after.active) == len(pool.active) + len(admitted)


@pytest.mark.parametrize("order", ADMIT_ORDERS)
@pytest.mark.parametrize("name", ADMIT_POLICIES)
def test_each_policy_keeps_its_inequality_for_all_that_is_admitted(name, order):
    num_admitted = num_refused = 0
    for queue, pool, rules in map(read, STATES):
        admitted, after = admit_queue(queue, pool, ADMIT_POLICIES[name], replace(rules, order=order))
        assert len(admitted) <= rules.num_seats
        for index in admitted:
            candidate = queue[index]
            inequality = slow_landing if candidate.vetoed_s > rules.max_veto_s else SLOW_POLICIES[name]
            if pool.active and not (name == "reserve_expected" and on_the_edge(candidate.newcomer, pool)):
                assert inequality(candidate.newcomer, pool)
            pool = pool.with_newcomer(candidate.newcomer)
            num_admitted += 1
        assert pool == after
        waits = [index for index in range(len(queue)) if index not in admitted]
        if len(admitted) < rules.num_seats and len(queue) <= MAX_REFUSALS and waits:
            first = waits[0] if order == "arrival" else min(waits, key=lambda index: queue[index].expected_tokens)
            is_overdue = any(
                queue[index].num_overtaken >= rules.max_overtaken or queue[index].vetoed_s > rules.max_veto_s
                for index in waits
            )
            if not is_overdue and not on_the_edge(queue[first].newcomer, pool):
                assert not SLOW_POLICIES[name](queue[first].newcomer, pool), "who is first and fits is not left waiting"
                num_refused += 1
    assert num_admitted >= 10 and num_refused >= 10


def test_reserve_peak_of_these_states_overflows_nowhere():
    """Let every batch that reserve_peak would admit run to the limits of its ranges: the pool holds it at each step."""
    num_batches = 0
    for queue, pool, rules in map(read, STATES):
        admitted, after = admit_queue(queue, pool, ADMIT_POLICIES["reserve_peak"], replace(rules, max_veto_s=1e9))
        if not admitted or len(after.active) == 1:
            continue
        num_batches += 1
        alive = [
            [q.num_prompt_tokens + q.num_output_tokens, q.length_range.high_tokens - q.num_output_tokens]
            for q in after.active
        ]
        while alive:
            alive = [[tokens + 1, left - 1] for tokens, left in alive]
            assert sum(num_blocks(tokens, pool.block_size_tokens) for tokens, _ in alive) <= pool.num_total_blocks
            alive = [[tokens, left] for tokens, left in alive if left > 0]
    assert num_batches >= 5
