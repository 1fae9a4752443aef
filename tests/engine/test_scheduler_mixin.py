"""The mixin inside both of vLLM's scheduler classes, driven step by step without an engine (`scheduler_rig`)."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from serving_plugin.core import admit as core_admit
from serving_plugin.core.admit import ADMIT_ORDERS, ADMIT_POLICIES, Candidate, DecodePool, QueueRules
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast, LengthRange
from serving_plugin.core.types import num_blocks

if TYPE_CHECKING:
    from scheduler_rig import Rig

MakeRig = Callable[..., "Rig"]
NEVER = "test_scheduler_mixin:refuse_all"


def refuse_all(newcomer: Any, pool: Any) -> bool:
    return False


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Made once; vLLM changes the environment when it is imported and configured, which ends here with the tests."""
    before = dict(os.environ)
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's own imports warn
            from scheduler_rig import make_vllm_config

            yield make_vllm_config(tmp_path_factory.mktemp("opt"))
    finally:
        os.environ.clear()
        os.environ |= before


@pytest.fixture(params=["plain", "async"])
def make_rig(request: pytest.FixtureRequest, vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """`make_rig(num_blocks, settings, **changes)`; the clock of the scheduler is the rig's."""
    from scheduler_rig import Rig

    rigs: list[Rig] = []
    monkeypatch.setattr("serving_plugin.engine.scheduler.unix_now_s", lambda: rigs[-1].now_s if rigs else 0.0)

    def make(num_blocks: int = 64, settings: dict[str, Any] | None = None, **changes: Any) -> Rig:
        rigs.append(Rig(vllm_config, request.param, num_blocks, settings or {}, **changes))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def prefill(order: str = "fcfs", sched_batch: int = 16, chunk_tokens: int = 0, **more: Any) -> dict[str, Any]:
    order_settings = {"policy": order, "sched_batch": sched_batch}
    return {"role": "prefill", "order": order_settings, "chunk": {"chunk_tokens": chunk_tokens}, **more}


def decode(policy: str = "greedy", order: str = "arrival", **admit: Any) -> dict[str, Any]:
    """Vetoes are not bounded unless a test says so."""
    return {"role": "decode", "admit": {"policy": policy, "order": order, "max_veto_s": 1e6, **admit}}


def test_the_class_follows_async_scheduling(vllm_config: Any) -> None:
    from scheduler_rig import ASYNC, PLAIN, configured, scheduler_arguments

    from serving_plugin.engine import scheduler as adapter

    for kind, expected in ((PLAIN, adapter.TetriScheduler), (ASYNC, adapter.TetriAsyncScheduler)):
        scheduler = adapter.make_scheduler(**scheduler_arguments(configured(vllm_config, {}, kind), 8))
        assert type(scheduler) is expected
        assert scheduler.defer_block_free is (kind == ASYNC)  # what vLLM takes from the same setting
        scheduler.shutdown()


def test_vllms_own_priorities_are_refused(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigurationError, match="--scheduling-policy priority"):
        make_rig(policy="priority")


# --- Order ---


@pytest.mark.parametrize(("order", "expected"), [("fcfs", "abcdef"), ("sjf", "bcafed"), ("ljf", "acbdef")])
def test_rounds_are_ordered_and_a_later_arrival_joins_the_next(make_rig: MakeRig, order: str, expected: str) -> None:
    rig = make_rig(64, prefill(order, sched_batch=3, chunk_tokens=16))
    for id, num_tokens in zip("abcde", (48, 16, 32, 64, 8), strict=True):
        rig.add(id, num_tokens)
    rig.step()
    rig.add("f", 4)  # the shortest of all, but the first round is under way
    rig.run()
    assert rig.served() == list(expected)
    rig.check_done()


def test_a_round_is_the_oldest_even_if_later_ones_are_shorter(make_rig: MakeRig) -> None:
    rig = make_rig(64, prefill("sjf", sched_batch=2, chunk_tokens=16))
    for id, num_tokens in zip("abcd", (64, 48, 32, 16), strict=True):
        rig.add(id, num_tokens)
    rig.run()
    assert rig.served() == list("badc")


def test_who_comes_while_a_round_is_under_way_joins_none_that_has_begun(make_rig: MakeRig) -> None:
    rig = make_rig(64, prefill("sjf", sched_batch=3, chunk_tokens=100))
    for id in "abc":
        rig.add(id, 60)
    rig.step()  # a, and 40 tokens of b
    for id, num_tokens in (("z", 80), ("s", 20), ("t", 21)):
        rig.add(id, num_tokens)
    rig.step()  # the rest of b, c, and s, with which the second round has begun
    for id in "uv":
        rig.add(id, 10)
    rig.run()
    assert rig.served() == list("abcstzuv")
    rig.check_done()


def test_a_policy_that_names_a_request_twice_loses_none(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(64, prefill("fcfs", sched_batch=3, chunk_tokens=16))
    monkeypatch.setattr(rig.scheduler, "_order", lambda prompts: [prompts[-1], *prompts])
    for id in "abc":
        rig.add(id, 16)
    rig.run()
    assert rig.served() == list("cab")
    rig.check_done()


def test_a_blocked_request_keeps_its_place_and_does_not_stop_the_round(make_rig: MakeRig) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    rig = make_rig(64, prefill("fcfs", sched_batch=2, chunk_tokens=16))
    blocked = rig.add("x", 16, structured_outputs=StructuredOutputsParams(regex="a"))  # its grammar is compiled
    for id in "abc":
        rig.add(id, 16)
    rig.steps(2)
    assert rig.served() == ["a", "b"]
    assert rig.waiting == ["x", "c"]
    grammar = SimpleNamespace(accept_tokens=lambda id, tokens: True)
    blocked.structured_output_request.grammar = grammar
    rig.run()
    assert rig.served() == ["a", "b", "x", "c"]


def test_preempted_requests_stay_at_the_head_and_come_back_first(make_rig: MakeRig) -> None:
    rig = make_rig(7, decode("greedy"))
    for id in "abc":
        rig.add(id, 30, 40)  # two blocks each, and soon three
    rig.run_until(lambda: bool(rig.preempted))
    assert rig.preempted == ["c"] and rig.waiting == ["c"]
    rig.add("late", 10, 2)
    rig.run_until(lambda: len(rig.preempted) > 1)  # b goes too, and stands before c
    assert rig.preempted == ["c", "b"] and rig.waiting == ["b", "c", "late"]
    rig.run()
    assert rig.served() == ["a", "b", "c", "late"]
    assert rig.resumed[:2] == ["b", "c"]
    rig.check_done()


def test_room_is_set_aside_for_preempted_requests(make_rig: MakeRig) -> None:
    rig = make_rig(8, decode("reserve_static"))
    for id in "ab":
        rig.add(id, 46, 40, length_range=(0, 41))
    rig.run_until(lambda: rig.preempted == ["b"])
    rig.add("late", 10, 2, length_range=(0, 3))  # would fit beside a, and keep b waiting
    rig.run()
    assert rig.served() == ["a", "b", "late"]
    assert rig.preempted == ["b"]
    rig.check_done()


# --- Chunks ---


def prompts_and_replies(seed: int, number: int) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    return [(generator.randint(3, 90), generator.randint(1, 6)) for _ in range(number)]


@pytest.mark.parametrize("order", ["fcfs", "sjf", "ljf"])
def test_a_step_computes_one_chunk_of_prompts_and_no_token_is_lost(make_rig: MakeRig, order: str) -> None:
    rig = make_rig(128, prefill(order, chunk_tokens=24))
    requests = prompts_and_replies(1, 12)
    for number, (num_prompt_tokens, num_output_tokens) in enumerate(requests):
        rig.add(str(number), num_prompt_tokens, num_output_tokens)
    left = sum(num_prompt_tokens for num_prompt_tokens, _ in requests)
    rig.run()
    for computed in rig.prompt_tokens:
        assert computed == min(24, left)  # a chunk is full as long as there are prompts
        left -= computed
    assert left == 0
    assert [rig.scheduled_tokens()[str(i)] for i in range(12)] == [prompt + out - 1 for prompt, out in requests]
    rig.check_done()


def test_the_chunk_is_changed_between_two_steps(make_rig: MakeRig) -> None:
    rig = make_rig(128, prefill(chunk_tokens=10))
    for number in range(8):
        rig.add(str(number), 100, 3)
    rig.steps(5)
    rig.scheduler.set_chunk_tokens(64)
    rig.steps(3)
    rig.scheduler.set_chunk_tokens(0)  # vLLM's own: 1024 tokens in all
    rig.run()
    computed = [tokens for tokens in rig.prompt_tokens if tokens]
    assert computed == [10] * 5 + [64] * 3 + [800 - 5 * 10 - 3 * 64]
    with pytest.raises(ConfigurationError, match="chunk_tokens=-1"):
        rig.scheduler.set_chunk_tokens(-1)
    rig.check_done()


def test_decodes_run_beside_a_chunk(make_rig: MakeRig) -> None:
    rig = make_rig(128, prefill(chunk_tokens=16))
    rig.add("d", 10, 30)
    rig.run_until(lambda: len(rig.planned["d"].tokens) >= 2)
    rig.add("p", 160)
    rig.run_until(lambda: "p" in rig.served())
    for output in rig.outputs[rig.planned["p"].first_step - 1 :][:9]:
        assert dict(output.num_scheduled_tokens) == {"d": 1, "p": 16}
    rig.run()
    rig.check_done()


def test_loads_that_end_together_start_together_whatever_the_chunk(make_rig: MakeRig) -> None:
    rig = make_rig(64, decode() | {"chunk": {"chunk_tokens": 128}})
    rig.load_steps = None
    for id in "abcd":
        rig.add(id, 40, 3, is_remote=True)
    rig.run_until(lambda: rig.loading == list("abcd"))
    rig.received = set("abcd")
    rig.run()
    assert len({rig.planned[id].first_step for id in "abcd"}) == 1
    rig.check_done()


# --- What the engine core sees between steps ---


def test_aborts_and_counts_see_the_whole_queue(make_rig: MakeRig) -> None:
    rig = make_rig(16, decode(NEVER))
    rig.add("a", 20, 60)  # an empty instance takes it
    rig.step()
    for id in "bcd":
        rig.add(id, 20, 5)
    rig.steps(3)
    assert rig.scheduler.get_request_counts() == (1, 3)
    assert rig.waiting == ["b", "c", "d"]
    assert rig.scheduler.get_num_unfinished_requests() == 4
    rig.abort("c")
    assert rig.waiting == ["b", "d"] and "c" not in rig.scheduler.requests
    rig.steps(3)
    assert rig.scheduler.get_request_counts() == (1, 2)
    rig.abort("a")
    rig.run_until(lambda: not rig.waiting)
    rig.run()
    assert rig.served() == ["a", "b", "d"]
    assert rig.planned["c"].tokens == []


def test_requests_unknown_to_the_tracker_pass(make_rig: MakeRig) -> None:
    rig = make_rig(16, decode(NEVER))
    rig.add("a", 20, 20)
    rig.step()
    for id in ("known", "unknown"):
        rig.add(id, 20, 5)
    rig.scheduler.tetri_tracker.finish("unknown", 0, False, 0.0)
    rig.steps(4)
    assert "unknown" in rig.served() and rig.waiting == ["known"]
    rig.run()
    rig.check_done()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_falls_idle_says_last_that_nothing_is_left(make_rig: MakeRig, role: str) -> None:
    is_held = role == "prefill"
    rig = make_rig(16, prefill() if is_held else decode())
    for id in "ab":
        rig.add(id, 20, 1 if is_held else 5, max_tokens=1 if is_held else 50, is_held=is_held)
    if is_held:
        rig.run_until(rig.all_answered)
        assert rig.last_snapshot.num_pinned_blocks == 4
        rig.sent = {"a", "b"}
    rig.run()
    last = rig.last_snapshot
    assert (last.num_running, last.num_loading, last.num_waiting, last.num_pinned_blocks) == (0, 0, 0, 0)
    assert (last.num_free_blocks, last.num_total_blocks, last.decode_busy) == (16, 16, 0.0)


def test_a_snapshot_counts_loading_running_and_waiting(make_rig: MakeRig) -> None:
    rig = make_rig(16, decode(NEVER))
    rig.load_steps = None
    rig.add("a", 40, 9, is_remote=True, length_range=(200, 400), max_tokens=500)
    rig.step()
    rig.add("b", 20, 5, length_range=(0, 200), max_tokens=500)
    rig.scheduler._publish()
    seen = rig.last_snapshot
    assert (seen.num_loading, seen.num_running, seen.num_waiting) == (1, 0, 1)
    assert (seen.num_free_blocks, seen.num_vetoed_tokens) == (16 - 3, 20)
    assert (seen.num_heavy_decodes, seen.num_light_decodes) == (1, 1)
    rig.received = {"a"}
    rig.run_until(lambda: rig.running == ["a"])
    rig.scheduler._publish()
    seen = rig.last_snapshot
    assert (seen.num_loading, seen.num_running, seen.num_waiting) == (0, 1, 1)


# --- Admission: the adapter decides as core does ---


@dataclass
class Judged:
    """One look at the queue: what the adapter gave to core, who stood there, and what vLLM's own containers said."""

    queue: list[Candidate]
    pool: DecodePool
    rules: QueueRules
    admitted: list[str]
    ids: list[str]
    num_offered_before: int
    step: int


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rig], list[Judged]]:
    """Record every state in which the adapter of a rig judges, and check it against vLLM as it is looked at."""

    def record(rig: Rig) -> list[Judged]:
        found: list[Judged] = []
        offers: list[list[str]] = []

        def admit_queue(queue: Any, pool: Any, policy: Any, rules: Any) -> Any:
            result = core_admit.admit_queue(queue, pool, policy, rules)
            scheduler = rig.scheduler
            preempted = {id for id in rig.waiting if scheduler.requests[id].num_preemptions}
            ids = [id for id in rig.waiting if id not in preempted]
            ids.sort(key=lambda id: scheduler.tetri_tracker.get(id).queued_since_s)
            assert pool.num_total_blocks == rig.num_total_blocks
            active = [*rig.running, *rig.loading]
            returning = [scheduler.requests[id] for id in rig.waiting if id in preempted]
            set_aside = sum(num_blocks(request.num_tokens, pool.block_size_tokens) for request in returning)
            assert pool.num_free_blocks == rig.num_free_blocks - set_aside
            assert [q.num_held_blocks for q in pool.active[: len(active)]] == [rig.held(id) for id in active]
            for id, q in zip((*active, *(request.request_id for request in returning)), pool.active, strict=True):
                request = scheduler.requests[id]
                out = request.num_output_tokens + request.num_output_placeholders
                assert (q.num_prompt_tokens, q.num_output_tokens) == (request.num_prompt_tokens, out)
                assert q.length_range.high_tokens > out
                assert q.forecast == scheduler.tetri_tracker.get(id).forecast
            assert rules.may_overtake is rig.settings.admit.may_overtake
            assert rules.num_seats == scheduler.max_num_running_reqs - len(active) - len(returning) > 0
            assert [c.newcomer.num_prompt_tokens for c in queue] == [rig.planned[id].num_prompt_tokens for id in ids]
            admitted = [ids[index] for index in result[0]]
            found.append(Judged(list(queue), pool, rules, admitted, ids, len(offers), rig.num_steps))
            return result

        def queue_of(policy: Any, requests: Any) -> Any:
            offers.append([request.request_id for request in requests])
            if found and found[-1].num_offered_before == len(offers) - 1:
                fresh = [id for id in offers[-1] if not rig.scheduler.requests[id].num_preemptions]
                assert fresh == found[-1].admitted, "vLLM is offered what core admitted, in its order"
            else:
                assert all(rig.scheduler.requests[id].num_preemptions for id in offers[-1])
            return real_queue_of(policy, requests)

        from serving_plugin.engine import scheduler as adapter

        real_queue_of = adapter._queue_of
        monkeypatch.setattr(adapter, "admit_queue", admit_queue)
        monkeypatch.setattr(adapter, "_queue_of", queue_of)
        return found

    return record


def busy_decode(rig: Rig, number: int = 30, seed: int = 5) -> None:
    """Requests that come a few a step, pulled from elsewhere, some longer than forecast; run to their ends."""
    generator = random.Random(seed)
    for i in range(number):
        low, width = generator.choice((0, 8, 20)), generator.choice((1, 8, 30))
        true = generator.randint(low, low + width + 6) + 1
        rig.add(
            f"q{i}",
            generator.randint(5, 60),
            true,
            max_tokens=90,
            length_range=(low, low + width),
            forecast=([low, low + width, 91], [0.8, 0.2]) if i % 3 else None,
            is_remote=i % 4 != 3,
        )
        rig.steps(generator.randint(0, 3))
    rig.run(1000)
    rig.check_done()


@pytest.mark.parametrize("order", ADMIT_ORDERS)
@pytest.mark.parametrize("policy", ADMIT_POLICIES)
def test_core_gives_the_same_decisions(make_rig: MakeRig, judged: Any, policy: str, order: str) -> None:
    rig = make_rig(16, decode(policy, order, overflow_probability=0.1, max_overtaken=7))
    states = judged(rig)
    busy_decode(rig)
    assert len(states) > 20
    assert any(state.admitted for state in states) and any(len(state.admitted) < len(state.ids) for state in states)
    for state in states:
        again, _ = core_admit.admit_queue(state.queue, state.pool, ADMIT_POLICIES[policy], state.rules)
        assert [state.ids[index] for index in again] == state.admitted
        assert state.pool.overflow_probability == 0.1
        assert (state.rules.order, state.rules.max_overtaken) == (order, 7)
        assert all(candidate.num_overtaken <= 7 for candidate in state.queue)


def test_a_candidate_is_what_the_dispatcher_sent(make_rig: MakeRig, judged: Any) -> None:
    rig = make_rig(16, decode(NEVER))
    states = judged(rig)
    rig.add("a", 20, 30, length_range=(0, 31))
    rig.step()
    rig.add("b", 33, 5, max_tokens=100, length_range=(10, 20), forecast=([0, 10, 20, 90], [0.25, 0.5, 0.25]))
    rig.add("c", 7, 5, max_tokens=9)  # nobody forecast it, and nothing has finished yet
    rig.step()
    first, second = states[-1].queue
    forecast = LengthForecast((0, 10, 20, 90), (0.25, 0.5, 0.25))
    assert (first.newcomer.num_prompt_tokens, first.newcomer.length_range) == (33, LengthRange(10, 20))
    assert first.newcomer.forecast == forecast and first.expected_tokens == forecast.mean_tokens()
    assert second.newcomer.length_range == LengthRange(0, 10)
    (active,) = states[-1].pool.active
    assert (active.num_prompt_tokens, active.length_range, active.num_held_blocks) == (20, LengthRange(0, 31), 2)
    assert active.forecast == LengthForecast((0, 31), (1.0,))


def test_a_preempted_request_is_judged_as_it_stands(make_rig: MakeRig, judged: Any) -> None:
    rig = make_rig(8, decode("reserve_expected"))
    states = judged(rig)
    for id in "ab":
        rig.add(id, 46, 40, length_range=(0, 41), forecast=([0, 20, 41], [0.9, 0.1]))
    rig.run_until(lambda: rig.preempted == ["b"])
    rig.add("late", 10, 2, length_range=(0, 3))
    rig.step()
    _, back = states[-1].pool.active
    out = len(rig.planned["b"].tokens)
    assert out > 0 and (back.num_prompt_tokens, back.num_output_tokens) == (46, out)
    assert back.num_held_blocks == num_blocks(46 + out, states[-1].pool.block_size_tokens)
    rig.run()
    rig.check_done()


def test_blocks_that_a_live_request_shares_are_known(make_rig: MakeRig, judged: Any) -> None:
    rig = make_rig(16, decode(NEVER), prefix_caching=True)
    states = judged(rig)
    rig.add("a", 50, 30)
    rig.run_until(lambda: len(rig.planned["a"].tokens) >= 2)
    rig.add("same", 50, 3)
    rig.add("other", 50, 3, token=9)
    rig.step()
    assert [candidate.newcomer.num_cached_blocks for candidate in states[-1].queue] == [3, 0]
    rig.run()
    rig.check_done()


def test_decisions_are_refreshed_when_nothing_changes(make_rig: MakeRig, judged: Any) -> None:
    from serving_plugin.engine.scheduler import JUDGE_EVERY_STEPS

    rig = make_rig(12, decode(NEVER))
    states = judged(rig)
    rig.add("a", 30, 60, max_tokens=90, length_range=(0, 10))
    rig.steps(3)
    rig.add("b", 60, 5, length_range=(40, 60), max_tokens=90)
    rig.run_until(lambda: len(rig.planned["a"].tokens) >= 50)
    looks = [state.step for state in states if state.ids == ["b"]]
    assert len(looks) > 3
    assert max(later - earlier for earlier, later in pairwise(looks)) == JUDGE_EVERY_STEPS
    rig.run()
    rig.check_done()


def test_a_queue_is_not_judged_again_while_nothing_changes(make_rig: MakeRig, judged: Any) -> None:
    rig = make_rig(12, decode(NEVER))
    states = judged(rig)
    rig.add("a", 30, 100)
    rig.add("b", 60, 5)
    rig.steps(40)
    assert len(states) <= 2 + 40 // 8
    before = len(states)
    rig.add("c", 10, 1)
    rig.step()
    assert len(states) == before + 1 and states[-1].ids == ["b", "c"]


def test_a_request_that_outgrows_its_range_gets_the_next(make_rig: MakeRig, judged: Any) -> None:
    rig = make_rig(12, decode(NEVER))
    states = judged(rig)
    rig.add("a", 30, 45, max_tokens=50, length_range=(0, 10))
    rig.add("b", 60, 5)
    rig.run_until(lambda: len(rig.planned["a"].tokens) >= 44)
    ranges = [state.pool.active[0].length_range for state in states if state.pool.active]
    assert ranges[0] == LengthRange(0, 10)
    assert ranges[-1] == LengthRange(40, 50)
    assert all(
        state.pool.active[0].num_output_tokens < state.pool.active[0].length_range.high_tokens
        for state in states
        if state.pool.active
    )


@pytest.mark.parametrize("policy", ["greedy", "reserve_static"])
@pytest.mark.parametrize("overtaking", ["by_policy", "always", "never"])
def test_who_may_be_passed_is_a_setting(make_rig: MakeRig, policy: str, overtaking: str) -> None:
    rig = make_rig(12, decode(policy, overtaking=overtaking))
    rig.add("a", 20, 20, length_range=(0, 30))
    rig.step()
    rig.add("big", 170, 5, length_range=(0, 10))
    rig.add("small", 20, 5, length_range=(0, 10))
    rig.run()
    is_passed = overtaking == "always" or (overtaking == "by_policy" and policy != "greedy")
    assert rig.served() == (["a", "small", "big"] if is_passed else ["a", "big", "small"])
    rig.check_done()


def test_a_request_that_another_instance_gave_back_comes_before_later_ones(make_rig: MakeRig, judged: Any) -> None:
    rig = make_rig(16, decode(NEVER))
    states = judged(rig)
    rig.add("a", 10, 20)
    rig.step()
    rig.add("b", 20, 3)
    rig.add("c", 30, 3)
    rig.add("back", 40, 3, is_remote=True, queued_since_s=rig.now_s - 50)
    rig.add("before", 50, 3, is_remote=True, queued_since_s=rig.now_s - 60)
    rig.step()
    assert [candidate.newcomer.num_prompt_tokens for candidate in states[-1].queue] == [50, 40, 20, 30]
    assert rig.waiting == ["b", "c", "back", "before"]  # for all but admission the order is that of arrival
    tracked = [rig.scheduler.tetri_tracker.get(id) for id in ("before", "back", "b", "c")]
    assert [t.vetoed_since_s is not None for t in tracked] == [True, False, False, False]  # first in line
    rig.run()
    assert [record["request_id"] for record in by_admission(rig)] == [
        f"own-{id}" for id in ("a", "before", "back", "b", "c")
    ]
    rig.check_done()


def by_admission(rig: Rig) -> list[dict[str, Any]]:
    return sorted(rig.scheduler.tetri_tracker.records(), key=lambda record: record["admitted_s"])


def num_overtaken(rig: Rig, id: str) -> int:
    return int(rig.scheduler.tetri_tracker.get(id).num_overtaken)


def test_only_who_was_really_taken_has_overtaken(make_rig: MakeRig, judged: Any) -> None:
    rig = make_rig(32, decode("reserve_static") | {"chunk": {"chunk_tokens": 16}})
    states = judged(rig)
    rig.add("a", 16, 90, length_range=(0, 91))
    rig.step()
    rig.add("big", 490, 5, length_range=(0, 10))  # needs the whole pool
    for i in range(3):
        rig.add(f"small{i}", 16, 40, length_range=(0, 41))
    counts = []
    for _ in range(6):
        rig.step()
        counts.append(num_overtaken(rig, "big"))
    assert states[1].admitted == ["small0", "small1", "small2"]  # all at once, but a step computes one of them
    assert [state.admitted for state in states[2:4]] == [["small1", "small2"], ["small2"]]
    assert counts == [1, 2, 3, 3, 3, 3]
    assert [num_overtaken(rig, f"small{i}") for i in range(3)] == [0, 0, 0]


def test_one_that_comes_back_after_a_preemption_overtakes_nobody_again(make_rig: MakeRig) -> None:
    rig = make_rig(8, decode("greedy", overtaking="always"))
    rig.add("a", 30, 40)
    rig.step()
    rig.add("big", 100, 5)
    rig.add("b", 30, 40)
    rig.run_until(lambda: rig.running == ["a", "b"])
    assert num_overtaken(rig, "big") == 1
    rig.run_until(lambda: rig.resumed == ["b"])
    assert rig.waiting == ["big"] and num_overtaken(rig, "big") == 1
    rig.run()
    rig.check_done()


MALFORMED = {
    "no_object": 1,
    "a_list": [1],
    "empty_forecast": {"forecast": {}},
    "no_edges": {"forecast": {"probabilities": [1.0]}},
    "forecast_of_text": {"forecast": "long"},
    "edges_of_text": {"forecast": {"edges_tokens": ["a", "b"], "probabilities": [1.0]}},
    "endless_edges": {"forecast": {"edges_tokens": [0, float("inf")], "probabilities": [1.0]}},
    "falling_edges": {"forecast": {"edges_tokens": [9, 3], "probabilities": [1.0]}},
    "no_probability": {"forecast": {"edges_tokens": [0, 3], "probabilities": [0.0]}},
    "not_a_number": {"forecast": {"edges_tokens": [0, 3], "probabilities": [float("nan")]}},
    "falling_range": {"forecast": {"edges_tokens": [0, 9], "probabilities": [1.0]}, "length_range": [5, 1]},
    "half_a_range": {"forecast": {"edges_tokens": [0, 9], "probabilities": [1.0]}, "length_range": [5]},
    "endless_range": {"forecast": {"edges_tokens": [0, 9], "probabilities": [1.0]}, "length_range": [0, float("inf")]},
    "range_of_text": {"forecast": {"edges_tokens": [0, 9], "probabilities": [1.0]}, "length_range": "0-9"},
    "queued_some_time": {"queued_since_s": "yesterday", "request_id": None},
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("meta", MALFORMED.values(), ids=list(MALFORMED))
def test_metadata_that_make_no_sense_lose_no_request(make_rig: MakeRig, role: str, meta: Any) -> None:
    is_held = role == "prefill"
    rig = make_rig(16, prefill() if is_held else decode("reserve_expected"))
    num_output_tokens, max_tokens = (1, 1) if is_held else (9, 20)
    # A copy: the scheduler notes in it when the prefill began.
    params = {"tetri": dict(meta) if isinstance(meta, dict) else meta}
    rig.add("bad", 40, num_output_tokens, max_tokens, is_held=is_held, is_remote=not is_held, params=params)
    rig.add("good", 40, num_output_tokens, max_tokens, is_held=is_held, is_remote=not is_held, length_range=(0, 21))
    assert rig.scheduler.tetri_tracker.get("bad").forecast_source == "history"
    rig.run_until(rig.all_answered)
    rig.sent = {"bad", "good"} if is_held else set()
    rig.run()
    rig.check_done()
    assert rig.scheduler.tetri_tracker.num_heavy_decodes == 0


# --- Progress ---


def test_a_request_without_blocks_does_not_stop_loads_that_hold_them(make_rig: MakeRig) -> None:
    rig = make_rig(8, decode("greedy"))
    rig.load_steps = None
    for id in "abc":
        rig.add(id, 32, 20, is_remote=True)
    rig.run_until(lambda: rig.loading == list("abc"))
    rig.add("big", 100, 5)  # seven blocks, of which two are left: it must wait for those that load
    rig.steps(3)
    assert rig.loading == list("abc") and rig.waiting == ["big"]
    rig.received = set("abc")
    rig.run()
    rig.check_done()


def test_preempted_requests_do_not_stop_loads_that_hold_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(7, decode("greedy"))
    rig.load_steps = None
    for id in "ab":
        rig.add(id, 30, 40)
    rig.add("load", 30, 10, is_remote=True)
    rig.run_until(lambda: "b" in rig.preempted)  # the running outgrow the pool while the load holds two blocks
    assert rig.loading == ["load"] and rig.waiting[0] == "b"
    rig.received = {"load"}
    rig.run()
    rig.check_done()


@pytest.mark.parametrize("policy", [*ADMIT_POLICIES, NEVER])
def test_an_empty_instance_admits_one_that_only_just_fits(make_rig: MakeRig, policy: str) -> None:
    rig = make_rig(8, decode(policy))
    rig.add("whole", 120, 8, length_range=(100, 101), max_tokens=500)  # its prompt leaves no block over
    rig.add("pulled", 128, 1, length_range=(100, 101), max_tokens=500, is_remote=True)
    rig.run()
    rig.check_done()


@pytest.mark.parametrize("policy", [*ADMIT_POLICIES, NEVER])
@pytest.mark.parametrize("order", ADMIT_ORDERS)
def test_nobody_starves_behind_a_stream_of_small_requests(make_rig: MakeRig, policy: str, order: str) -> None:
    rig = make_rig(12, decode(policy, order, max_veto_s=5.0, max_overtaken=9))
    rig.add("first", 20, 30, length_range=(0, 40), max_tokens=90)
    rig.step()
    rig.add("big", 130, 40, length_range=(40, 50), max_tokens=60)
    for i in range(60):
        rig.add(f"small{i}", 20, 8, length_range=(0, 10), max_tokens=20)
        rig.steps(2)
    rig.run(2000)
    rig.check_done()
    place = rig.served().index("big")
    assert place <= 1 + 9


def test_a_veto_ends_as_soon_as_the_prompt_fits(make_rig: MakeRig) -> None:
    rig = make_rig(16, decode(NEVER, max_veto_s=20.0))
    rig.add("a", 20, 200)
    rig.step()
    rig.add("b", 20, 5)
    rig.step()
    vetoed_s = rig.now_s
    rig.run_until(lambda: "b" in rig.served())
    assert 20.0 < rig.now_s - vetoed_s <= 20.0 + 8 + 2  # a step takes a second; the queue is judged every eighth
    tracked = next(r for r in rig.scheduler.tetri_tracker.records() if r["request_id"] == "own-b")
    assert tracked["vetoed_since_s"] == vetoed_s and tracked["admitted_s"] is not None


# --- Withdrawing ---


def nixl(rig: Rig) -> Any:
    return rig.scheduler.connector.connector_scheduler


def test_a_waiting_request_is_relinquished_and_its_kv_stays_where_it_is(make_rig: MakeRig) -> None:
    rig = make_rig(16, decode(NEVER))
    rig.add("a", 20, 30)
    rig.step()
    rig.add("b", 40, 5, length_range=(0, 50), max_tokens=100, is_remote=True)
    rig.add("c", 40, 5, is_remote=True)
    rig.steps(2)
    assert nixl(rig)._heartbeat_by_engine["prefill"].req_ids == {"b-on-prefill", "c-on-prefill"}
    assert rig.scheduler.withdraw("own-b", 89) == "waits_on"  # 40 + 50 tokens
    assert rig.waiting == ["b", "c"] and "b" in nixl(rig)._heartbeat_req_engine
    assert rig.scheduler.requests["b"].kv_transfer_params["do_remote_prefill"] is True
    assert rig.scheduler.withdraw("own-b", 90) == "done"
    assert rig.waiting == ["c"] and "b" not in rig.scheduler.requests
    assert nixl(rig)._reqs_need_recv == {}  # the prefill instance is not told to free
    assert nixl(rig)._heartbeat_by_engine["prefill"].req_ids == {"c-on-prefill"}
    assert rig.scheduler.withdraw("own-b", 90) == "unknown"
    rig.check()


def test_a_request_withdrawn_for_good_frees_what_is_held_for_it(make_rig: MakeRig) -> None:
    rig = make_rig(16, decode(NEVER))
    rig.add("a", 20, 30)
    rig.step()
    rig.add("b", 40, 5, is_remote=True)
    rig.steps(2)
    assert rig.scheduler.withdraw("own-b", None) == "done"
    assert list(nixl(rig)._reqs_need_recv) == ["b"] and nixl(rig)._reqs_need_recv["b"][1] == []
    assert nixl(rig)._heartbeat_by_engine == {}
    output = rig.step()
    assert list(output.kv_connector_metadata.reqs_to_recv) == ["b"]
    rig.check()


def test_what_was_admitted_is_not_withdrawn(make_rig: MakeRig) -> None:
    rig = make_rig(7, decode("greedy"))
    rig.load_steps = None
    rig.add("load", 20, 5, is_remote=True)
    rig.add("run", 20, 60)
    rig.run_until(lambda: rig.loading == ["load"] and rig.running == ["run"])
    for own_id in ("own-load", "own-run"):
        assert rig.scheduler.withdraw(own_id, None) == "not_waiting"
    assert rig.scheduler.withdraw("own-nobody", None) == "unknown"  # it may be on its way here
    rig.received = {"load"}
    rig.add("more", 40, 40)
    rig.run_until(lambda: "more" in rig.preempted)
    assert rig.scheduler.withdraw("own-more", None) == "not_waiting"  # it has put out tokens
    rig.run()
    rig.check_done()


def test_a_request_of_several_samples_is_withdrawn_as_one(make_rig: MakeRig) -> None:
    rig = make_rig(16, decode(NEVER))
    rig.add("a", 20, 30)
    rig.step()
    ids = [f"{sample}_cmpl-gw-1-0-0123456{sample}" for sample in range(2)]
    for sample, id in enumerate(ids):
        rig.add(id, 20 + 40 * sample, 5, params={"do_remote_prefill": True}, length_range=(0, 6), own_id="gw-1")
    rig.step()
    assert rig.scheduler.withdraw("gw-1", 50) == "waits_on"
    params = [rig.scheduler.requests[id].kv_transfer_params for id in ids]
    assert [p["do_remote_prefill"] for p in params] == [True, True]  # as it was: they wait on
    assert rig.scheduler.withdraw("gw-1", 100) == "done"
    assert rig.waiting == []


# --- Pinned KV on a prefill instance ---


def test_no_prefill_starts_while_too_much_waits_to_be_pulled(make_rig: MakeRig) -> None:
    rig = make_rig(16, prefill(transfer={"pinned_budget": 0.25}))
    for id in "ab":
        rig.add(id, 32, is_held=True)
    rig.run_until(rig.all_answered)
    assert rig.num_free_blocks == 16 - 4  # four blocks of sixteen: the budget
    rig.add("c", 32, is_held=True)
    rig.steps(5)
    assert rig.served() == ["a", "b"] and rig.waiting == ["c"]
    rig.sent = {"a"}
    rig.run_until(lambda: "c" in rig.served())
    rig.run_until(lambda: rig.planned["c"].is_answered)
    rig.add("d", 32, is_held=True)
    rig.steps(3)
    assert rig.waiting == ["d"]
    rig.sent = {"b", "c"}
    rig.run_until(lambda: rig.planned["d"].is_answered)
    rig.sent = {"d"}
    rig.run()
    rig.check_done()


def test_prompts_under_way_count_against_the_pinned_budget(make_rig: MakeRig) -> None:
    rig = make_rig(16, prefill(chunk_tokens=16, transfer={"pinned_budget": 0.5}))
    rig.add("a", 120, is_held=True)  # eight blocks in the end: all of the budget
    rig.add("b", 16, is_held=True)
    rig.run_until(lambda: rig.planned["a"].is_answered)
    rig.steps(3)
    assert rig.served() == ["a"]
    rig.sent = {"a"}
    rig.run_until(lambda: rig.planned["b"].is_answered)


def test_a_prompt_larger_than_the_pinned_budget_is_taken_alone(make_rig: MakeRig) -> None:
    rig = make_rig(16, prefill(transfer={"pinned_budget": 0.1}))
    for id in "ab":
        rig.add(id, 100, is_held=True)
    rig.run_until(lambda: rig.planned["a"].is_answered)
    rig.steps(3)
    assert rig.waiting == ["b"]
    rig.sent = {"a"}
    rig.run_until(lambda: rig.planned["b"].is_answered)


def test_requests_that_run_whole_pin_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(16, prefill(transfer={"pinned_budget": 0.25}))
    rig.add("whole", 80, 60)  # five blocks and more, never to be pulled
    rig.step()
    rig.add("a", 32, is_held=True)
    rig.run_until(lambda: rig.planned["a"].is_answered)
    assert not rig.planned["whole"].is_answered


def test_what_nobody_pulls_passes_a_prompt_that_is_held_back(make_rig: MakeRig) -> None:
    rig = make_rig(16, prefill(transfer={"pinned_budget": 0.25}))
    for id in "ab":
        rig.add(id, 32, is_held=True)
    rig.run_until(rig.all_answered)
    rig.add("c", 48, is_held=True)
    rig.add("whole", 32, 20)
    rig.add("d", 16, is_held=True)  # a smaller one does not pass, or a large one might wait for ever
    rig.add("whole2", 32, 20)
    rig.steps(3)
    assert rig.running == ["whole", "whole2"] and rig.waiting == ["c", "d"]
    rig.sent = {"a"}  # two blocks of four are pinned: room for d, but c comes first
    rig.steps(3)
    assert rig.waiting == ["c", "d"]
    rig.sent = {"b"}
    rig.run_until(rig.all_answered)
    assert rig.served() == ["a", "b", "whole", "whole2", "c", "d"]
    rig.sent = {"c", "d"}
    rig.run()
    rig.check_done()


def test_what_is_held_back_does_not_use_up_the_step_of_what_nobody_pulls(make_rig: MakeRig) -> None:
    rig = make_rig(16, prefill("fcfs", sched_batch=2, chunk_tokens=32, transfer={"pinned_budget": 0.25}))
    for id in "ab":
        rig.add(id, 32, is_held=True)
    rig.run_until(rig.all_answered)
    for id in "cdefg":  # far more than a chunk
        rig.add(id, 48, is_held=True)
    rig.add("whole", 16, 1)
    rig.run_until(lambda: rig.planned["whole"].is_answered)
    assert rig.waiting == list("cdefg")


def test_an_instance_says_that_it_is_over_its_pinned_budget_as_long_as_it_holds_a_prompt_back(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(16, prefill(chunk_tokens=16, transfer={"pinned_budget": 0.25}))

    def is_over() -> bool:
        rig.scheduler._publish()
        return rig.last_snapshot.is_over_pinned_budget

    for id in "ab":
        rig.add(id, 32, is_held=True)
    rig.step()
    assert rig.waiting == ["b"] and not is_over()  # it waits for its turn
    rig.run_until(rig.all_answered)
    rig.step()
    assert rig.last_snapshot.num_pinned_blocks == 4 and not is_over()  # full, but nobody is held back
    rig.add("c", 32, is_held=True)
    rig.steps(2)
    assert rig.waiting == ["c"] and is_over()
    rig.sent = {"a"}
    rig.run_until(lambda: not rig.waiting)
    assert not is_over()
    rig.run_until(rig.all_answered)
    rig.add("d", 32, is_held=True)
    rig.steps(2)
    assert is_over()
    rig.abort("d")
    assert rig.last_snapshot.is_over_pinned_budget is False
    rig.sent = {"b", "c"}
    rig.run_until(lambda: not rig.scheduler.requests)
    rig.add("e", 32, is_held=True)
    assert not is_over()


def test_a_preempted_prompt_counts_against_the_pinned_budget(make_rig: MakeRig) -> None:
    rig = make_rig(10, prefill(chunk_tokens=4, transfer={"pinned_budget": 0.7}))
    rig.add("whole", 60, 60)
    rig.add("held", 90, is_held=True)  # the other outgrows the pool while this one is computed
    rig.run_until(lambda: rig.preempted == ["held"] and rig.waiting == ["held"])
    rig.add("next", 32, is_held=True)
    offered = rig.scheduler._offered(list(rig.scheduler.waiting))
    assert [request.request_id for request in offered] == ["held"]  # six blocks and two more, of a budget of seven
    rig.run_until(lambda: rig.planned["held"].is_answered)
    assert rig.waiting == ["next"]
    rig.sent = {"held"}
    rig.run_until(lambda: rig.planned["next"].is_answered)


# --- Totals ---


@pytest.mark.parametrize("v2_runner", [False, True])
@pytest.mark.parametrize("case", ["prefill", "chunks_preempted", "decode"])
def test_totals_tell_prompts_recomputed_tokens_and_replies_apart(make_rig: MakeRig, case: str, v2_runner: bool) -> None:
    if case == "prefill":
        rig = make_rig(128, prefill(chunk_tokens=20), v2_runner=v2_runner)
        requests = [(f"q{i}", *pair, False) for i, pair in enumerate(prompts_and_replies(3, 10))]
    elif case == "chunks_preempted":  # prompts cut into chunks outgrow the pool before they are complete
        rig = make_rig(11, prefill(chunk_tokens=10), v2_runner=v2_runner)
        requests = [("a", 38, 60, False), ("b", 50, 40, False), ("c", 60, 10, False)]
    else:
        rig = make_rig(12, decode("greedy"), v2_runner=v2_runner)
        requests = [
            (f"q{i}", prompt, out + 20, i % 2 == 0) for i, (prompt, out) in enumerate(prompts_and_replies(4, 9))
        ]
    for id, num_prompt_tokens, num_output_tokens, is_remote in requests:
        rig.add(id, num_prompt_tokens, num_output_tokens, is_remote=is_remote)
    rig.run(1000)
    rig.check_done()
    totals = rig.scheduler.tetri_inspect("requests")["totals"]
    scheduled = sum(rig.scheduled_tokens().values())
    loaded = sum(prompt for _, prompt, _, is_remote in requests if is_remote)
    # The last prompt token of a pulled request is computed here.
    prompts = sum(1 if is_remote else prompt for _, prompt, _, is_remote in requests)
    replies = sum(out - 1 for _, _, out, _ in requests)
    assert totals["num_prompt_tokens_loaded"] == loaded
    assert totals["num_prompt_tokens_computed"] == prompts
    assert totals["num_output_tokens"] == replies
    assert totals["num_tokens_recomputed"] == scheduled - prompts - replies
    assert totals["num_preemptions"] == len(rig.preempted)
    assert bool(rig.preempted) is (case != "prefill")
    assert (totals["num_tokens_recomputed"] > 0) is (case != "prefill")
    records = {record["request_id"]: record for record in rig.scheduler.tetri_inspect("requests")["requests"]}
    for id, num_prompt_tokens, num_output_tokens, is_remote in requests:
        record = records[f"own-{id}"]
        assert record["num_local_prompt_tokens"] == (1 if is_remote else num_prompt_tokens)
        assert record["num_remote_tokens"] == (num_prompt_tokens if is_remote else 0)
        assert record["num_output_tokens"] == num_output_tokens


@pytest.mark.parametrize("recompute", [False, True])
def test_a_failed_load_is_an_error_or_computed_here(make_rig: MakeRig, recompute: bool) -> None:
    rig = make_rig(16, decode("reserve_dynamic"), recompute_failed_loads=recompute)
    rig.load_steps = None
    rig.add("a", 40, 5, is_remote=True)
    rig.run_until(lambda: rig.loading == ["a"])
    rig.failed = {"a"}
    rig.run()
    assert rig.planned["a"].is_answered
    assert len(rig.planned["a"].tokens) == (5 if recompute else 0)
    assert rig.num_free_blocks == rig.num_total_blocks
    (record,) = rig.scheduler.tetri_inspect("requests")["requests"]
    assert (record["num_remote_tokens"], record["num_local_prompt_tokens"]) == (0, 40 if recompute else 0)
    assert rig.scheduler.tetri_totals["num_prompt_tokens_loaded"] == 0
    assert rig.scheduler.tetri_totals["num_prompt_tokens_computed"] == (40 if recompute else 0)


def test_blocks_of_an_aborted_load_are_given_out_as_soon_as_they_are_free(make_rig: MakeRig) -> None:
    rig = make_rig(12, decode("reserve_static"))
    rig.load_steps = None
    rig.add("run", 20, 100)
    rig.add("load", 100, 5, is_remote=True)
    rig.run_until(lambda: rig.loading == ["load"])
    rig.add("next", 100, 5)
    rig.steps(2)
    rig.abort("load")  # the blocks stay until the transfer, which cannot be called off, has ended
    rig.steps(3)
    assert rig.waiting == ["next"] and rig.num_free_blocks < 7
    rig.received = {"load"}
    rig.run_until(lambda: rig.num_free_blocks >= 7)
    rig.step()
    assert rig.waiting == []


# --- Changing an instance ---


def test_settings_are_not_changed_while_requests_are_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig(16, decode("greedy"))
    rig.add("a", 20, 5)
    with pytest.raises(ConfigurationError, match="1 requests are in flight"):
        rig.scheduler.configure(rig.settings)
    rig.run()
    rig.scheduler.configure(rig.settings)
    rig.add("b", 20, 5)
    rig.run()
    rig.check_done()


# --- The recorded states ---


def test_the_states_that_core_is_tested_with_are_recorded_here(make_rig: MakeRig) -> None:
    from record_states import NUM_BLOCKS, NUM_STATES, RECORDED, SETTINGS, as_file, record

    from serving_plugin.engine.scheduler import TetriScheduler

    rig = make_rig(NUM_BLOCKS, SETTINGS)
    states = record(rig)
    assert len(states) > 2 * NUM_STATES
    made = json.loads(as_file(states))
    kept = json.loads(RECORDED.read_text())
    if isinstance(rig.scheduler, TetriScheduler):  # what the file was recorded with
        assert made == kept, "decisions have changed: run tests/engine/record_states.py and look at the difference"
    assert {key: value for key, value in made.items() if key not in ("states", "num_judged")} == {
        key: value for key, value in kept.items() if key not in ("states", "num_judged")
    }
    assert [set(state) for state in made["states"]] == [set(state) for state in kept["states"]]
