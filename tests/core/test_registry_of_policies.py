import sys

import pytest

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.registry import EXTENSION_POINTS, policy_names, resolve_policy

EXPECTED = {
    "place": ["least_load"],
    "order": ["fcfs", "ljf", "sjf"],
    "chunk": ["fixed"],
    "dispatch": ["imbalance", "least_load", "power_of_two", "power_of_two_by_class", "random"],
    "admit": ["greedy", "reserve_dynamic", "reserve_expected", "reserve_peak", "reserve_static", "reserve_static_net"],
    "flip": ["hysteresis", "predicted_demand", "smoothed"],
    "bypass": ["never"],
}


def test_every_extension_point_offers_its_policies():
    assert {point: policy_names(point) for point in EXTENSION_POINTS} == EXPECTED


@pytest.mark.parametrize(("point", "name"), [(p, n) for p, names in EXPECTED.items() for n in names])
def test_a_known_name_resolves_to_its_function(point, name):
    assert resolve_policy(point, name) is EXTENSION_POINTS[point][name]


@pytest.fixture
def own_policies(tmp_path, monkeypatch):
    (tmp_path / "own_policies.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Slow:\n"
        "    seconds: float = 1.0\n"
        "    def __call__(self, newcomer, pool):\n"
        "        return False\n"
        "mine = Slow()\n"
        "limit = 3\n"
    )
    (tmp_path / "broken_policies.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_policies", None)


def test_a_policy_of_ones_own_is_imported_by_name(own_policies):
    assert resolve_policy("admit", "own_policies:mine")(None, None) is False


@pytest.mark.parametrize(
    ("point", "name", "message"),
    [
        ("order", "lifo", r"order\.policy='lifo' is unknown; known: fcfs, ljf, sjf, or \"module:attr\""),
        ("order", "", r"order\.policy='' is unknown; known: fcfs, ljf, sjf"),
        ("sort", "fcfs", r"extension point 'sort' is unknown; known: place, order, chunk"),
        ("admit", "no_such_module:mine", r"cannot import 'no_such_module' \(ModuleNotFoundError"),
        ("admit", "broken_policies:mine", r"cannot import 'broken_policies' \(RuntimeError: first line second line\)"),
        ("admit", "own_policies:absent", r"module 'own_policies' has no 'absent'"),
        ("admit", "own_policies:limit", r"is a int, not a callable"),
        ("admit", "own_policies:Slow", r"is a class: name an instance of it"),
        ("admit", "own_policies:", r"must read \"module:attr\""),
        ("admit", ":mine", r"must read \"module:attr\""),
        ("admit", ".relative:mine", r"must read \"module:attr\""),
    ],
)
def test_a_wrong_name_gives_one_line_that_names_it(own_policies, point, name, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        resolve_policy(point, name)
    assert "\n" not in str(caught.value)
    assert repr(name) in str(caught.value) or point == "sort"
