"""Step times of one model on one machine as `tetri profile` measured them: coefficients, raw points, the JSON file.

Standard library only. The functions have the form of the published fits for other hardware (LLMServe/DistServe), so
that a simulation may take either: prefill = a + b * tokens + c * sum of squared prompt tokens, decode = a + b * context
tokens + c * batch size, in milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from serving_plugin.core.errors import ConfigurationError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Coefficients:
    """(a, b, c) in ms, none negative; errors are relative, of the fit against the measured medians."""

    ms: tuple[float, float, float]
    median_error: float
    max_error: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Steps that prefilled one prompt of `num_tokens`, every repetition."""

    num_tokens: int
    step_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Steps of `batch_size` decodes whose prompts had `context_tokens` each and which read `sum_context_tokens`."""

    batch_size: int
    context_tokens: int
    sum_context_tokens: float
    step_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MeasuredCostModel:
    """How long a step takes here, and which chunk saturates it; with what it was measured on and the raw points.

    `num_cores`: processor cores of the engine. `chunk_tokens`: `saturation_tokens` in whole blocks.
    """

    model: str
    dtype: str
    device: str
    num_cores: int
    measured: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    block_size_tokens: int
    plateau_tokens_per_s: float
    saturation_tokens: int
    chunk_tokens: int
    prefill: Coefficients
    decode: Coefficients
    prefill_points: tuple[PrefillPoint, ...]
    decode_points: tuple[DecodePoint, ...]

    def prefill_s(self, prompt_tokens: Sequence[int]) -> float:
        """Seconds of a step that prefills these whole prompts; 0 without one."""
        if not prompt_tokens:
            return 0.0
        a, b, c = self.prefill.ms
        return (a + b * sum(prompt_tokens) + c * sum(n * n for n in prompt_tokens)) / 1000.0

    def decode_s(self, context_tokens: Sequence[int]) -> float:
        """Seconds of a step that gives each of these contexts its next token; 0 without one."""
        if not context_tokens:
            return 0.0
        a, b, c = self.decode.ms
        return (a + b * sum(context_tokens) + c * len(context_tokens)) / 1000.0

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`, which `from_json` takes back."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: object) -> MeasuredCostModel:
        """The model in `data`, what `json.loads` gave.

        Raises:
            ConfigurationError: another format, a key that is missing or unknown, a wrong type, a negative number.
        """
        if not isinstance(data, Mapping):
            raise ConfigurationError(f"cost model: {_shown(data)} is no JSON object")
        if data.get("format") != FORMAT or isinstance(data.get("format"), bool):
            raise ConfigurationError(
                f"cost model: format={_shown(data.get('format'))} is unknown, this version reads {FORMAT}: "
                f"measure again with `tetri profile`"
            )
        given = _object(cls, {key: value for key, value in data.items() if key != "format"}, "")
        return cls(
            model=_text(given, "model"),
            dtype=_text(given, "dtype"),
            device=_text(given, "device"),
            num_cores=_count(given, "num_cores"),
            measured=_text(given, "measured"),
            machine=_mapping(given, "machine"),
            versions=_mapping(given, "versions"),
            block_size_tokens=_count(given, "block_size_tokens"),
            plateau_tokens_per_s=_number(given, "plateau_tokens_per_s"),
            saturation_tokens=_count(given, "saturation_tokens"),
            chunk_tokens=_count(given, "chunk_tokens"),
            prefill=_coefficients(given, "prefill"),
            decode=_coefficients(given, "decode"),
            prefill_points=tuple(
                PrefillPoint(_count(one, "num_tokens", at), _numbers(one, "step_ms", at))
                for at, one in _objects(PrefillPoint, given, "prefill_points")
            ),
            decode_points=tuple(
                DecodePoint(
                    _count(one, "batch_size", at),
                    _count(one, "context_tokens", at),
                    _number(one, "sum_context_tokens", at),
                    _numbers(one, "step_ms", at),
                )
                for at, one in _objects(DecodePoint, given, "decode_points")
            ),
        )


def read_cost_model(path: Path) -> MeasuredCostModel:
    """The cost model in a file of `tetri profile`. Raises `ConfigurationError` that names the file."""
    try:
        return MeasuredCostModel.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}); `tetri profile` makes one") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _shown(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _refuse(at: str, key: str, value: object, limit: str) -> ConfigurationError:
    return ConfigurationError(f"cost model: {at}{key}={_shown(value)}: must be {limit}")


def _object(kind: type, value: object, at: str) -> Mapping[str, Any]:
    """`value` as a JSON object with exactly the fields of the dataclass `kind`."""
    if not isinstance(value, Mapping):
        raise _refuse("", at.rstrip("."), value, "an object")
    names = [one.name for one in fields(kind)]
    for name in names:
        if name not in value:
            raise ConfigurationError(f"cost model: {at}{name} is missing")
    for key in value:
        if key not in names:
            raise ConfigurationError(f"cost model: {at}{key} is unknown; known are {', '.join(names)}")
    return value


def _objects(kind: type, given: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(where it stands, object) of each item of a list."""
    value = given[key]
    if not isinstance(value, list | tuple) or not value:
        raise _refuse("", key, value, "a list that is not empty")
    return [(f"{key}[{i}].", _object(kind, one, f"{key}[{i}].")) for i, one in enumerate(value)]


def _coefficients(given: Mapping[str, Any], key: str) -> Coefficients:
    at = f"{key}."
    one = _object(Coefficients, given[key], at)
    match _numbers(one, "ms", at):
        case (a, b, c):
            return Coefficients((a, b, c), _number(one, "median_error", at), _number(one, "max_error", at))
    raise _refuse(at, "ms", one["ms"], "three numbers")


def _text(given: Mapping[str, Any], key: str) -> str:
    if not isinstance(given[key], str):
        raise _refuse("", key, given[key], "a text")
    return str(given[key])


def _mapping(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    if not isinstance(given[key], Mapping):
        raise _refuse("", key, given[key], "an object")
    return dict(given[key])


def _count(given: Mapping[str, Any], key: str, at: str = "") -> int:
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refuse(at, key, value, "a whole number, 1 or more")
    return value


def _number(given: Mapping[str, Any], key: str, at: str = "") -> float:
    return _checked(given[key], key, at)


def _numbers(given: Mapping[str, Any], key: str, at: str) -> tuple[float, ...]:
    value = given[key]
    if not isinstance(value, list | tuple) or not value:
        raise _refuse(at, key, value, "a list of numbers")
    return tuple(_checked(one, f"{key}[{i}]", at) for i, one in enumerate(value))


def _checked(value: object, key: str, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _refuse(at, key, value, "a number, 0 or more")
    return float(value)
