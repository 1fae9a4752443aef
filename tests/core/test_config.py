"""Instance settings: strict both ways."""

import json

import pytest

from serving_plugin.core.admit import ADMIT_POLICIES, QueueRules
from serving_plugin.core.config import AdmitSettings, InstanceSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import Role

MINIMAL = {"role": "prefill", "instance_id": "p0", "url": "http://127.0.0.1:8101"}


def test_round_trip_through_json() -> None:
    settings = InstanceSettings.from_dict(
        MINIMAL | {"gateways": ["http://127.0.0.1:8000"], "order": {"policy": "ljf"}, "admit": {"max_veto_s": 3}}
    )
    assert settings.role is Role.PREFILL
    assert settings.order.policy == "ljf" and settings.order.sched_batch == 16
    assert InstanceSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"ordre": {}}, ["unknown key ordre", "order"]),
        ({"order": {"policy": "sjf", "batch": 3}}, ["unknown key order.batch", "sched_batch"]),
        ({"order": {"sched_batch": 0}}, ["order.sched_batch=0", "1 or more"]),
        ({"order": {"sched_batch": "16"}}, ["order.sched_batch='16'", "int"]),
        ({"order": []}, ["order=[]", "object"]),
        ({"role": "both"}, ["role='both'", "prefill, decode"]),
        ({"url": "127.0.0.1:80"}, ["url='127.0.0.1:80'", "http"]),
        ({"gateways": "http://x"}, ["gateways='http://x'", "list"]),
        ({"gateways": ["x"]}, ["gateways='x'", "http"]),
        ({"admit": {"max_veto_s": 0}}, ["admit.max_veto_s", "above 0"]),
        ({"admit": {"order": "longest"}}, ["admit.order='longest'", "arrival or shortest_expected"]),
        ({"admit": {"overtaking": "sometimes"}}, ["admit.overtaking='sometimes'", "by_policy or always or never"]),
        ({"admit": {"overtaking": True}}, ["admit.overtaking=True", "str"]),
        ({"admit": {"max_overtaken": 0}}, ["admit.max_overtaken=0", "1 or more"]),
        ({"admit": {"max_overtaken": 1.5}}, ["admit.max_overtaken=1.5", "int"]),
        ({"admit": {"relinquish_after_s": 0}}, ["admit.relinquish_after_s=0.0", "above 0"]),
        ({"admit": {"max_wait_s": -1}}, ["admit.max_wait_s=-1.0", "above 0"]),
        ({"admit": {"overflow_probability": 0}}, ["admit.overflow_probability=0.0", "between 0 and 0.5"]),
        ({"admit": {"overflow_probability": 0.5}}, ["admit.overflow_probability=0.5", "between 0 and 0.5"]),
        ({"admit": {"overflow_probability": "2%"}}, ["admit.overflow_probability='2%'", "float"]),
        ({"forecast": {"range": "mean"}}, ["forecast.range='mean'", "argmax or quantile"]),
        ({"prediction": {"mode": "later"}}, ["prediction.mode='later'", "parallel or sequential"]),
        ({"transfer": {"link": "tcp"}}, ["transfer.link='tcp'", "auto or direct"]),
        ({"transfer": {"pinned_budget": 0}}, ["transfer.pinned_budget=0.0", "above 0, at most 1"]),
        ({"transfer": {"pinned_budget": 1.01}}, ["transfer.pinned_budget=1.01", "above 0, at most 1"]),
        ({"transfer": {"pinned": 0.5}}, ["unknown key transfer.pinned", "pinned_budget"]),
        ({"prediction": {"core": True}}, ["prediction.core=True", "int"]),
        ({"prediction": {"shadow_model": ""}}, ["prediction.shadow_model=''", "URI or folder"]),
        ({"prediction": {"shadow_model": 3}}, ["prediction.shadow_model=3", "str"]),
    ],
)
def test_bad_settings_name_the_key(change: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        InstanceSettings.from_dict(MINIMAL | change)
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message


def test_bounds_of_waiting_are_read_and_have_defaults() -> None:
    settings = InstanceSettings.from_dict(MINIMAL)
    assert (settings.admit.policy, settings.admit.order) == ("reserve_expected", "arrival")
    assert (settings.dispatch.policy, settings.forecast.range) == ("power_of_two_by_class", "quantile")
    assert settings.admit.overtaking == "by_policy" and settings.admit.max_veto_s == QueueRules(1).max_veto_s
    assert 0 < settings.admit.relinquish_after_s < settings.admit.max_wait_s
    assert 0 < settings.admit.max_veto_s < settings.admit.max_wait_s
    assert settings.transfer.pinned_budget == 0.5
    admit = {
        "policy": "reserve_expected",
        "order": "shortest_expected",
        "overtaking": "never",
        "max_veto_s": 1,
        "max_overtaken": 3,
        "relinquish_after_s": 2.0,
        "max_wait_s": 20,
        "overflow_probability": 0.1,
    }
    settings = InstanceSettings.from_dict(MINIMAL | {"admit": admit, "transfer": {"pinned_budget": 1}})
    assert settings.to_dict()["admit"] == admit
    assert settings.transfer.pinned_budget == 1.0


@pytest.mark.parametrize(
    ("overtaking", "under_greedy", "under_others"),
    [("by_policy", False, True), ("always", True, True), ("never", False, False)],
)
def test_who_may_be_passed(overtaking: str, under_greedy: bool, under_others: bool) -> None:
    assert AdmitSettings("greedy", overtaking=overtaking).may_overtake is under_greedy
    for policy in (*(ADMIT_POLICIES.keys() - {"greedy"}), "module:policy"):
        assert AdmitSettings(policy, overtaking=overtaking).may_overtake is under_others


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigurationError, match="instance_id"):
        InstanceSettings.from_dict({"role": "decode", "url": "http://h"})
