"""Messages between an instance's agent and a gateway: typed, versioned, size-bounded JSON. Imports `core` only.

agent -> gateway: `Hello` once per connection, then a `LoadReport` per interval and a `TransferReport` per KV transfer.
gateway -> agent: `Welcome` once, then a `LoadBroadcast` per interval.
Whatever arrives is either a whole, well-typed message or a `WireError`: nothing half-read goes further. The same holds
for what a gateway sends with its requests over HTTP (`PrefillAsk`, `DispatchAsk`).
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from serving_plugin.core.errors import TetriError
from serving_plugin.core.types import InstanceLoad, Role

WIRE_VERSION = 3
MAX_MESSAGE_BYTES = 1 << 20
_MAX_INT = (1 << 63) - 1
AGENT_PATH = "/tetri/agent"
LEG_HEADER = "X-Tetri-Leg"
# A gateway sends it with a decode leg that it can bind to another instance; an instance that gives one back answers
# 503 with it. The KV cache stays where it is.
RELINQUISH_HEADER = "X-Tetri-Relinquish"
DISPATCH_PATH = "/tetri/dispatch"
REQUEST_ID_HEADER = "X-Request-Id"
# What brings our scheduler and connector into vLLM: `--scheduler-cls` and the head of `--kv-transfer-config`.
SCHEDULER_FACTORY = "serving_plugin.engine.scheduler.make_scheduler"
KV_CONNECTOR = {
    "kv_connector": "TetriConnector",
    "kv_connector_module_path": "serving_plugin.engine.connector",
    "kv_role": "kv_both",  # an instance may become the other role
}
COMPLETION_DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's default for completions; chat has none


class WireError(TetriError):
    """A control message that cannot be read or sent; the connection it came on is closed."""

    http_status = 400
    openai_type = "BadRequestError"


@dataclass(frozen=True, slots=True)
class PrefillAsk:
    """Our part of a prefill leg's `kv_transfer_params`, as gateways send it."""

    request_id: str
    max_tokens: int | None
    arrival_s: float | None
    exclude: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DispatchAsk:
    """A gateway asks for another decode instance: what that needs of the decision of before, and whom not to choose."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    length_range: tuple[int, ...]
    is_heavy_decode: bool
    exclude: tuple[str, ...]


class Leg(StrEnum):
    """Value of `LEG_HEADER`: which part of a request an instance is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Hello:
    """An instance presents itself. `model` is the served name; `predictor` its version or URI, for display only."""

    version: int
    instance_id: str
    incarnation: str
    url: str
    model: str
    kv_fingerprint: str
    role: Role
    role_epoch: int
    predictor: str | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an instance says of itself; `sent_at_s` is the sender's unix clock, `load.sequence` its order."""

    load: InstanceLoad
    sent_at_s: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    """A decode instance has pulled a KV cache (`num_remote_tokens` 0: it failed and recomputes). Unix seconds."""

    request_id: str
    transfer_start_s: float
    transfer_end_s: float
    num_remote_tokens: int


@dataclass(frozen=True, slots=True)
class LoadBroadcast:
    """Every load that a gateway knows, with the base URL of each instance by id.

    `recent_lengths_tokens` are the output lengths of the last finished requests: the history forecast of whoever has no
    other. `is_forecast_trusted` False: what the length predictor says has drifted (this gateway's drift watch), so that
    history takes its place.
    """

    loads: tuple[InstanceLoad, ...]
    urls: Mapping[str, str]
    sent_at_s: float
    recent_lengths_tokens: tuple[int, ...] = ()
    is_forecast_trusted: bool = True


@dataclass(frozen=True, slots=True)
class Welcome:
    """A gateway accepts an agent's `Hello`."""

    gateway_id: str


Message = Hello | LoadReport | TransferReport | LoadBroadcast | Welcome

_TYPES: dict[str, type[Message]] = {
    "hello": Hello,
    "load_report": LoadReport,
    "transfer_report": TransferReport,
    "load_broadcast": LoadBroadcast,
    "welcome": Welcome,
}
_NAMES: dict[type[Message], str] = {cls: name for name, cls in _TYPES.items()}


def encode(message: Message) -> str:
    """One JSON text with `type` and `version`.

    Raises:
        WireError: the text would be over `MAX_MESSAGE_BYTES` or holds a number that JSON cannot (NaN, infinity).
    """
    name = _NAMES[type(message)]
    try:
        text = json.dumps(
            {"type": name, "version": WIRE_VERSION, "body": _plain(message)}, separators=(",", ":"), allow_nan=False
        )
    except ValueError as error:
        raise WireError(f"cannot encode {name}: {error}") from None
    _check_size(text, name)
    return text


def decode(text: str) -> Message:
    """The message in `text`.

    Raises:
        WireError: too large, not JSON, another version, an unknown type, or a key missing, unknown or of a wrong type.
    """
    _check_size(text, "message")
    try:
        raw = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise WireError(f"message is a JSON {type(raw).__name__}, not an object")
    version, name = raw.get("version"), raw.get("type")
    if type(version) is not int or version != WIRE_VERSION:
        raise WireError(f"message has version {version!r}, this side speaks {WIRE_VERSION}: run one release everywhere")
    if not isinstance(name, str) or name not in _TYPES:
        raise WireError(f"message type {name!r} is unknown; known: {', '.join(_TYPES)}")
    message: Message = _build(_TYPES[name], raw.get("body"), name)
    if isinstance(message, Hello) and message.version != WIRE_VERSION:
        raise WireError(f"hello.version is {message.version}, this side speaks {WIRE_VERSION}")
    return message


def prefill_ask(tetri: object) -> PrefillAsk:
    """Read the "tetri" part of a prefill leg; keys that are not ours are left alone.

    Raises:
        WireError: a key is missing or of a wrong type.
    """
    defaults: dict[str, object] = {"max_tokens": None, "arrival_s": None, "exclude": []}
    given = _part(PrefillAsk, _need(dict, tetri, "tetri"))
    ask: PrefillAsk = _build_dataclass(PrefillAsk, defaults | given, "tetri")
    return ask


def dispatch_ask(body: object) -> DispatchAsk:
    """Read the body of a `DISPATCH_PATH` request: "tetri", a decision of before, and "exclude".

    Raises:
        WireError: a key is missing or of a wrong type, or the range holds no length.
    """
    raw = _need(dict, body, "the body")
    given = _part(DispatchAsk, _need(dict, raw.get("tetri"), "tetri")) | {"exclude": raw.get("exclude", [])}
    ask: DispatchAsk = _build_dataclass(DispatchAsk, given, "tetri")
    bounds = ask.length_range
    if len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise WireError(f"tetri.length_range is {str(list(bounds))[:60]}, needs [low, high] with low < high")
    return ask


def _part(kind: type, raw: Mapping[str, object]) -> dict[str, object]:
    return {name: raw[name] for name in _hints(kind) if name in raw}


def _check_size(text: str, name: str) -> None:
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", errors="surrogatepass"))
    if num_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"{name} has {num_bytes} bytes, limit {MAX_MESSAGE_BYTES}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(kind: Any, raw: object, where: str) -> Any:
    """`raw` as a value of type `kind` (the few kinds that messages are made of), or `WireError` naming `where`."""
    origin = typing.get_origin(kind)
    if origin is types.UnionType:  # `X | None` only
        (inner,) = (a for a in typing.get_args(kind) if a is not type(None))
        return None if raw is None else _build(inner, raw, where)
    if origin is tuple:
        (inner, _) = typing.get_args(kind)
        return tuple(_build(inner, v, f"{where}[{i}]") for i, v in enumerate(_need(list, raw, where)))
    if origin is Mapping:
        (_, inner) = typing.get_args(kind)
        return {k: _build(inner, v, f"{where}.{k}") for k, v in _need(dict, raw, where).items()}
    if is_dataclass(kind):
        return _build_dataclass(kind, _need(dict, raw, where), where)
    if issubclass(kind, StrEnum):
        text = _need(str, raw, where)
        if text not in list(kind):
            raise WireError(f"{where} is {text!r}; known: {', '.join(kind)}")
        return kind(text)
    if kind is float:
        return _finite(raw, where)
    value = _need(kind, raw, where)
    if kind is int and not -_MAX_INT <= value <= _MAX_INT:
        raise WireError(f"{where} has over 64 bits")
    if kind is int and value < 0:
        raise WireError(f"{where} is {value}, needs 0 or more")
    return value


def _build_dataclass(kind: Any, raw: dict[str, object], where: str) -> Any:
    hints = _hints(kind)
    names = [f.name for f in fields(kind)]
    for name in names:
        if name not in raw:
            raise WireError(f"{where}.{name} is missing")
    for name in raw:
        if name not in hints:
            raise WireError(f"{where}.{name} is unknown")
    return kind(**{name: _build(hints[name], raw[name], f"{where}.{name}") for name in names})


def _need(kind: type, raw: object, where: str) -> Any:
    if type(raw) is not kind:  # exactly: bool is no int here
        raise WireError(f"{where} is a {type(raw).__name__}, needs {kind.__name__}")
    return raw


def _finite(raw: object, where: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        raise WireError(f"{where} is a {type(raw).__name__}, needs float")
    try:
        value = float(raw)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise WireError(f"{where} is not a finite number")
    return value
