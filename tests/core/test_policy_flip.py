from dataclasses import replace

import pytest
from core_samples import load
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.flip import (
    FLIP_POLICIES,
    DemandSnapshot,
    FlipSettings,
    FlipState,
    hysteresis,
    predicted_demand,
    smoothed,
)
from serving_plugin.core.types import InstanceState, Role

P, D = Role.PREFILL, Role.DECODE
SETTINGS = FlipSettings(under_for_s=60, min_dwell_s=60, drain_timeout_s=30, smoothing_s=30)
NO_DEMAND = DemandSnapshot()


def cluster(**busy):
    """Loads by name: `p1=0.05` is a prefill instance that is 5 % busy."""
    return [load(id, P if id[0] == "p" else D, busy_fraction=value) for id, value in busy.items()]


def watch(policy, snapshots, demand=NO_DEMAND, step_s=10.0, settings=SETTINGS, state=None):
    """Feed one snapshot every `step_s`; returns [(time, decision)] and the last state."""
    state, decisions = state or FlipState(), []
    for i, loads in enumerate(snapshots):
        decision, state = policy(loads, demand, state, i * step_s, settings)
        if decision is not None:
            decisions.append((i * step_s, decision))
    return decisions, state


@pytest.mark.parametrize("policy", FLIP_POLICIES.values())
def test_an_instance_idle_for_long_enough_flips(policy):
    decisions, _ = watch(policy, [cluster(p1=0.05, p2=0.9, d1=0.9)] * 8)
    assert [(at, d.instance_id, d.to_role) for at, d in decisions] == [(60.0, "p1", D)]
    assert decisions[0][1].reason == "busy under 10% for 60 s"


@pytest.mark.parametrize("policy", FLIP_POLICIES.values())
def test_decode_instances_flip_to_prefill_too(policy):
    decisions, _ = watch(policy, [cluster(p1=0.9, d1=0.05, d2=0.5)] * 7)
    assert [(d.instance_id, d.to_role) for _, d in decisions] == [("d1", P)]


def test_under_the_threshold_means_under():
    assert watch(hysteresis, [cluster(p1=0.10, p2=0.9, d1=0.9)] * 20)[0] == []


def test_one_busy_report_starts_the_time_anew_under_hysteresis_only():
    idle, blip = cluster(p1=0.0, p2=0.9, d1=0.9), cluster(p1=0.3, p2=0.9, d1=0.9)
    snapshots = [idle] * 5 + [blip] + [idle] * 3
    assert watch(hysteresis, snapshots)[0] == []
    assert [(at, d.instance_id) for at, d in watch(smoothed, snapshots)[0]] == [(60.0, "p1")]
    assert [at for at, _ in watch(hysteresis, [*snapshots, *[idle] * 4])[0]] == [120.0]


def test_a_smoothed_load_follows_a_lasting_change():
    idle, busy = cluster(p1=0.0, p2=0.9, d1=0.9), cluster(p1=0.9, p2=0.9, d1=0.9)
    assert watch(smoothed, [idle] * 3 + [busy] * 10)[0] == []


@pytest.mark.parametrize("policy", FLIP_POLICIES.values())
@pytest.mark.parametrize(
    "loads",
    [
        cluster(p1=0.0, d1=0.9),
        cluster(p1=0.9, d1=0.0),
        [*cluster(p1=0.0, d1=0.9), load("p2", P, state=InstanceState.DRAINING)],
        [*cluster(p1=0.0, d1=0.9), load("p2", P, state=InstanceState.LOST)],
    ],
)
def test_the_last_ready_instance_of_a_role_stays(policy, loads):
    assert watch(policy, [loads] * 20, DemandSnapshot(10**9))[0] == []


@pytest.mark.parametrize("policy", FLIP_POLICIES.values())
def test_nobody_flips_in_a_cluster_with_nothing_to_do(policy):
    assert watch(policy, [cluster(p1=0.0, p2=0.0, d1=0.0, d2=0.0)] * 20)[0] == []


def test_the_one_idle_longest_goes_first_then_by_id():
    early = cluster(p1=0.9, p2=0.0, p3=0.9, d1=0.9)
    assert watch(hysteresis, [early] + [cluster(p1=0.0, p2=0.0, p3=0.9, d1=0.9)] * 8)[0][0][1].instance_id == "p2"
    assert watch(hysteresis, [cluster(p2=0.0, p1=0.0, p3=0.9, d1=0.9)] * 8)[0][0][1].instance_id == "p1"


def test_the_dwell_in_a_role_is_a_minimum():
    settings = replace(SETTINGS, under_for_s=10, min_dwell_s=100)
    decisions, _ = watch(hysteresis, [cluster(p1=0.0, p2=0.9, d1=0.9)] * 12, settings=settings)
    assert [at for at, _ in decisions] == [100.0]


@pytest.mark.parametrize("change", [{"incarnation": "2"}, {"role_epoch": 1}])
def test_a_new_incarnation_or_epoch_starts_anew(change):
    loads = cluster(p1=0.0, p2=0.9, d1=0.9)
    changed = [replace(loads[0], **change), *loads[1:]]
    assert watch(hysteresis, [loads] * 6 + [changed] * 6)[0] == []
    assert [at for at, _ in watch(hysteresis, [loads] * 6 + [changed] * 7)[0]] == [120.0]


def test_one_flip_at_a_time_until_it_shows_in_a_report():
    loads = cluster(p1=0.0, p2=0.0, p3=0.0, p4=0.9, d1=0.9)
    settings = replace(SETTINGS, drain_timeout_s=1000)
    decisions, state = watch(hysteresis, [loads] * 20, settings=settings)
    assert [d.instance_id for _, d in decisions] == ["p1"]
    flipped = [replace(loads[0], role=D, role_epoch=1, busy_fraction=0.5), *loads[1:]]
    decision, _ = hysteresis(flipped, NO_DEMAND, state, 200.0, settings)
    assert decision is not None
    assert decision.instance_id == "p2"
    gone, _ = hysteresis(loads[1:], NO_DEMAND, state, 200.0, settings)
    assert gone is not None
    assert gone.instance_id == "p2"


def test_an_abandoned_flip_makes_way_for_others_and_dwells_again():
    decisions, _ = watch(hysteresis, [cluster(p1=0.0, p2=0.0, p3=0.9, d1=0.9)] * 18)
    # p1 does not drain within 30 s: p2's turn; p1 is tried again only after 60 s more.
    assert [(at, d.instance_id) for at, d in decisions] == [(60.0, "p1"), (100.0, "p2"), (140.0, "p1")]


def test_demand_that_outgrows_decode_flips_the_least_busy_prefill_instance_without_waiting_for_it_to_idle():
    loads = cluster(p1=0.8, p2=0.6, d1=0.9)  # 100 blocks of 16 tokens
    assert watch(predicted_demand, [loads] * 8, DemandSnapshot(1600))[0] == []
    decisions, _ = watch(predicted_demand, [loads] * 8, DemandSnapshot(1601))
    assert [(at, d.instance_id, d.to_role) for at, d in decisions] == [(60.0, "p2", D)]
    assert decisions[0][1].reason == "forecast needs 1601 KV tokens, decode instances hold 1600"


def test_demand_keeps_decode_instances_that_the_forecast_needs():
    loads = cluster(p1=0.9, d1=0.0, d2=0.5)
    assert watch(predicted_demand, [loads] * 8, DemandSnapshot(1601))[0] == []
    assert [d.instance_id for _, d in watch(predicted_demand, [loads] * 8, DemandSnapshot(1600))[0]] == ["d1"]


def test_policies_leave_the_given_state_alone():
    state = FlipState()
    hysteresis(cluster(p1=0.0, d1=0.9), NO_DEMAND, state, 0.0, SETTINGS)
    assert state == FlipState()


@pytest.mark.parametrize(
    ("key", "value"),
    [("under_busy_fraction", 0.0), ("under_busy_fraction", 1.5), ("under_for_s", -1.0), ("smoothing_s", 0.0)],
)
def test_impossible_settings_are_refused(key, value):
    with pytest.raises(ConfigurationError, match=rf"flip\.{key}={value}"):
        FlipSettings(**{key: value})


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(FLIP_POLICIES)),
    st.lists(st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=5, max_size=5), min_size=5, max_size=40),
    st.integers(0, 6000),
    st.integers(0, 4),
)
def test_a_role_is_never_emptied_even_when_reports_lag(name, busy, demand, lag):
    """Instances drain at once when told; reports show it `lag` ticks later."""
    quick = FlipSettings(under_for_s=1, min_dwell_s=1, drain_timeout_s=10, smoothing_s=1)
    true = {f"i{i}": load(f"i{i}", P if i < 3 else D) for i in range(5)}
    history, state = [], FlipState()
    for tick, fractions in enumerate(busy):
        true = {id: replace(x, busy_fraction=b) for (id, x), b in zip(true.items(), fractions, strict=True)}
        history.append(list(true.values()))
        seen = history[max(0, tick - lag)]
        decision, state = FLIP_POLICIES[name](seen, DemandSnapshot(demand), state, float(tick), quick)
        if decision is not None:
            before = true[decision.instance_id]
            assert before.role is not decision.to_role
            true[before.id] = replace(before, role=decision.to_role, role_epoch=before.role_epoch + 1)
        assert {x.role for x in true.values()} == {P, D}
