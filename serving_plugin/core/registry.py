"""The extension points and their policies: one literal table, and how a name becomes a function. Standard library only.

A policy of one's own is named "module:attr" and imported only when asked for. Definitions: docs/definitions.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from serving_plugin.core.admit import ADMIT_POLICIES
from serving_plugin.core.bypass import BYPASS_POLICIES
from serving_plugin.core.chunk import CHUNK_POLICIES
from serving_plugin.core.dispatch import DISPATCH_POLICIES
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.flip import FLIP_POLICIES
from serving_plugin.core.order import ORDER_POLICIES
from serving_plugin.core.place import PLACE_POLICIES

Policy = Callable[..., Any]

EXTENSION_POINTS: dict[str, dict[str, Policy]] = {
    "place": cast(dict[str, Policy], PLACE_POLICIES),
    "order": cast(dict[str, Policy], ORDER_POLICIES),
    "chunk": cast(dict[str, Policy], CHUNK_POLICIES),
    "dispatch": cast(dict[str, Policy], DISPATCH_POLICIES),
    "admit": cast(dict[str, Policy], ADMIT_POLICIES),
    "flip": cast(dict[str, Policy], FLIP_POLICIES),
    "bypass": cast(dict[str, Policy], BYPASS_POLICIES),
}


def policy_names(point: str) -> list[str]:
    """Names of the built-in policies of an extension point, sorted; ConfigurationError if there is no such point."""
    return sorted(_policies(point))


def resolve_policy(point: str, name: str) -> Policy:
    """The policy called `name`, or the callable at "module:attr".

    Raises:
        ConfigurationError: No such point or name, or nothing callable can be imported from there.
    """
    policies = _policies(point)
    if name in policies:
        return policies[name]
    if ":" in name:
        return _imported(point, name)
    known = ", ".join(sorted(policies))
    raise ConfigurationError(
        f'{point}.policy={name!r} is unknown; known: {known}, or "module:attr" for one of your own'
    )


def _policies(point: str) -> dict[str, Policy]:
    if point not in EXTENSION_POINTS:
        raise ConfigurationError(f"extension point {point!r} is unknown; known: {', '.join(EXTENSION_POINTS)}")
    return EXTENSION_POINTS[point]


def _imported(point: str, name: str) -> Policy:
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ConfigurationError(f'{point}.policy={name!r}: must read "module:attr", as in "my_package.policies:mine"')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a foreign module raises on import, the setting is what names it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(f"{point}.policy={name!r}: cannot import {module_name!r} ({reason})") from error
    policy = getattr(module, attribute, None)
    if policy is None:
        raise ConfigurationError(f"{point}.policy={name!r}: module {module_name!r} has no {attribute!r}")
    if isinstance(policy, type):
        raise ConfigurationError(f"{point}.policy={name!r} is a class: name an instance of it")
    if not callable(policy):
        raise ConfigurationError(f"{point}.policy={name!r} is a {type(policy).__name__}, not a callable")
    return cast(Policy, policy)
