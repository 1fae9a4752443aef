"""Instance settings: strict both ways."""

import json

import pytest

from serving_plugin.core.config import InstanceSettings
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
        ({"forecast": {"range": "mean"}}, ["forecast.range='mean'", "argmax or quantile"]),
        ({"prediction": {"mode": "later"}}, ["prediction.mode='later'", "parallel or sequential"]),
        ({"transfer": {"link": "tcp"}}, ["transfer.link='tcp'", "auto or direct"]),
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


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigurationError, match="instance_id"):
        InstanceSettings.from_dict({"role": "decode", "url": "http://h"})
