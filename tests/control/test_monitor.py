"""Monitor rules: sequence numbers, incarnations, connections. No sockets: a connection is any object."""

from __future__ import annotations

import pytest
from stub_instance import make_hello, make_load

from serving_plugin.control.monitor import MAX_REMEMBERED_LOST, Monitor
from serving_plugin.core.types import InstanceState, Role
from serving_plugin.wire import LoadReport, WireError


def report(monitor, connection, now_s=0.0, **changes) -> bool:
    return monitor.report(LoadReport(make_load(**changes), 0.0), connection, now_s)


@pytest.fixture
def monitor():
    monitor = Monitor()
    monitor.join(make_hello(), "c1")
    return monitor


def test_an_instance_is_routable_from_its_first_report(monitor):
    assert monitor.loads() == []
    assert report(monitor, "c1", now_s=5.0)
    assert monitor.loads() == [make_load()]
    assert monitor.instances()[0].received_s == 5.0


@pytest.mark.parametrize(("sequence", "taken"), [(4, False), (5, False), (6, True)])
def test_reports_that_are_not_newer_are_dropped(monitor, sequence, taken):
    report(monitor, "c1", sequence=5, num_running=1)
    assert report(monitor, "c1", sequence=sequence, num_running=2) is taken
    assert monitor.loads()[0].num_running == (2 if taken else 1)


def test_a_new_incarnation_replaces_the_old_one_and_its_sequence(monitor):
    report(monitor, "c1", sequence=1000)
    monitor.join(make_hello(incarnation="b"), "c2")
    assert monitor.loads() == []  # nothing is known of the new process yet
    assert not report(monitor, "c1", sequence=1001)  # the old one speaks on
    assert report(monitor, "c2", incarnation="b", sequence=1)
    monitor.leave("c1")  # and its connection ends late
    assert [load.incarnation for load in monitor.loads()] == ["b"]


def test_a_redial_keeps_load_and_sequence(monitor):
    report(monitor, "c1", sequence=7)
    monitor.add_sent_tokens("p0", 100)
    monitor.join(make_hello(), "c2")
    assert monitor.loads()[0].sequence == 7
    assert monitor.sent_tokens() == {"p0": 100}
    assert not report(monitor, "c2", sequence=7)


def test_a_lost_connection_unroutes_at_once_and_is_remembered(monitor):
    report(monitor, "c1")
    monitor.leave("c1")
    assert monitor.loads() == [] and monitor.models() == [] and monitor.url("p0") is None
    assert [hello.instance_id for hello in monitor.lost()] == ["p0"]
    monitor.join(make_hello(), "c2")
    assert monitor.lost() == []


def test_what_is_remembered_is_bounded():
    monitor = Monitor()
    for i in range(MAX_REMEMBERED_LOST + 5):
        monitor.join(make_hello(f"p{i}"), i)
        monitor.leave(i)
    assert len(monitor.lost()) == MAX_REMEMBERED_LOST
    assert monitor.lost()[-1].instance_id == f"p{MAX_REMEMBERED_LOST + 4}"


@pytest.mark.parametrize("changes", [{"instance_id": "p1"}, {"incarnation": "b"}])
def test_a_report_for_somebody_else_is_refused(monitor, changes):
    with pytest.raises(WireError, match="on the connection of p0/a"):
        report(monitor, "c1", **changes)


def test_sent_tokens_start_anew_with_each_report(monitor):
    report(monitor, "c1", sequence=1)
    monitor.add_sent_tokens("p0", 10)
    monitor.add_sent_tokens("p0", 5)
    monitor.add_sent_tokens("gone", 5)
    assert monitor.sent_tokens() == {"p0": 15}
    report(monitor, "c1", sequence=1)  # dropped: says nothing new
    assert monitor.sent_tokens() == {"p0": 15}
    report(monitor, "c1", sequence=2)
    assert monitor.sent_tokens() == {"p0": 0}


def test_fingerprints_must_agree_within_a_model(monitor):
    with pytest.raises(WireError, match="KV fingerprint 'x', p0 has 'fp'"):
        monitor.join(make_hello("d0", Role.DECODE, kv_fingerprint="x"), "c2")
    monitor.join(make_hello("d0", Role.DECODE, kv_fingerprint="x", model="other"), "c2")
    monitor.join(make_hello(incarnation="b", kv_fingerprint="y"), "c3")  # its own old self is no hindrance
    assert monitor.models() == ["m", "other"]


def test_loads_are_filtered_and_ordered(monitor):
    report(monitor, "c1")
    for i, role, model in (("d1", Role.DECODE, "m"), ("d0", Role.DECODE, "m"), ("x0", Role.DECODE, "other")):
        monitor.join(make_hello(i, role, model=model), i)
        report(monitor, i, instance_id=i, role=role)
    report(monitor, "d1", instance_id="d1", role=Role.DECODE, state=InstanceState.DRAINING, sequence=2)
    ids = [load.id for load in monitor.loads()]
    assert ids == ["d0", "d1", "p0", "x0"]
    assert [load.id for load in monitor.ready(Role.DECODE, "m")] == ["d0"]
    assert [load.id for load in monitor.loads(Role.DECODE, "m", without={"d0"})] == ["d1"]
    broadcast = monitor.broadcast("m", 3.0)
    assert [load.id for load in broadcast.loads] == sorted(broadcast.urls) == ids[:-1]
    assert broadcast.sent_at_s == 3.0
    assert [load.id for load in monitor.broadcast("other", 3.0).loads] == ["x0"]
