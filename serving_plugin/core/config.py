"""Settings of one instance, as they stand in `kv_connector_extra_config` on vLLM's command line.

Strict both ways: an unknown key, a wrong type or a value out of bounds is a `ConfigurationError` that names the key.
Standard library only; policy names are checked by `core.registry` where they are resolved.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from serving_plugin.core.admit import ADMIT_ORDERS
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import Role

T = TypeVar("T")

# Where prefill saturates: SmolLM2-135M on one AVX-512 core (measured), OPT-13B on a V100 (TetriInfer figure 2).
DEFAULT_CPU_CHUNK_TOKENS = 128
DEFAULT_GPU_CHUNK_TOKENS = 512


def _require(ok: bool, key: str, value: object, limit: str) -> None:
    if not ok:
        raise ConfigurationError(f"{key}={value!r}: must be {limit}")


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """Order of the prefill queue. `sched_batch`: requests in a round (TetriInfer 3.3.1)."""

    policy: str = "sjf"
    sched_batch: int = 16

    def __post_init__(self) -> None:
        _require(self.sched_batch >= 1, "order.sched_batch", self.sched_batch, "1 or more")


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """Prompt tokens per step. `chunk_tokens` 0 keeps vLLM's own `max_num_batched_tokens`."""

    policy: str = "fixed"
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        _require(self.chunk_tokens >= 0, "chunk.chunk_tokens", self.chunk_tokens, "0 (vLLM's own limit) or more")


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Which decode instance takes a prefilled request (TetriInfer 3.3.4)."""

    policy: str = "power_of_two_by_class"
    seed: int = 0


OVERTAKING = ("by_policy", "always", "never")


@dataclass(frozen=True, slots=True)
class AdmitSettings:
    """When a decode instance admits a request, and how long it may wait.

    `overtaking`: whether one that is refused may be passed: `always`, `never`, or `by_policy`, which is never under
    greedy (vLLM's own rule) and always under the others.

    `order`: `arrival`, or `shortest_expected` (fewest expected output tokens first). A request is overtaken at most
    `max_overtaken` times. First in line and refused for `max_veto_s`, it is admitted as soon as its prompt fits. After
    `relinquish_after_s` in the queue it may be bound to another decode instance, one with room. After `max_wait_s` in
    an instance's queue (prefill or decode) the client gets 429. `overflow_probability`: the risk that reserve_expected
    takes.
    """

    policy: str = "reserve_expected"
    order: str = "arrival"
    overtaking: str = "by_policy"
    max_veto_s: float = 30.0
    max_overtaken: int = 64
    relinquish_after_s: float = 5.0
    max_wait_s: float = 300.0
    overflow_probability: float = 0.15

    def __post_init__(self) -> None:
        _require(self.order in ADMIT_ORDERS, "admit.order", self.order, " or ".join(ADMIT_ORDERS))
        _require(self.overtaking in OVERTAKING, "admit.overtaking", self.overtaking, " or ".join(OVERTAKING))
        _require(self.max_veto_s > 0, "admit.max_veto_s", self.max_veto_s, "above 0 seconds")
        _require(self.max_overtaken >= 1, "admit.max_overtaken", self.max_overtaken, "1 or more")
        _require(self.relinquish_after_s > 0, "admit.relinquish_after_s", self.relinquish_after_s, "above 0 seconds")
        _require(self.max_wait_s > 0, "admit.max_wait_s", self.max_wait_s, "above 0 seconds")
        _require(
            0 < self.overflow_probability < 0.5,
            "admit.overflow_probability",
            self.overflow_probability,
            "between 0 and 0.5",
        )

    @property
    def may_overtake(self) -> bool:
        """Whether a refused request may be passed."""
        return self.overtaking == "always" or (self.overtaking == "by_policy" and self.policy != "greedy")


@dataclass(frozen=True, slots=True)
class ForecastSettings:
    """How a range comes from a forecast: `quantile` at `coverage`, or `argmax` (the paper's bucket).

    With argmax nothing but the bucket is left of the forecast, and reserve_expected has less to go by.
    """

    range: str = "quantile"
    coverage: float = 0.9
    granularity_tokens: int = 200
    history_size: int = 256
    heavy_decode_over_tokens: int = 128

    def __post_init__(self) -> None:
        _require(self.range in ("argmax", "quantile"), "forecast.range", self.range, "argmax or quantile")
        _require(0 < self.coverage < 1, "forecast.coverage", self.coverage, "between 0 and 1")
        _require(self.granularity_tokens >= 1, "forecast.granularity_tokens", self.granularity_tokens, "1 or more")
        _require(self.history_size >= 1, "forecast.history_size", self.history_size, "1 or more")


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """The length predictor of a prefill instance. `model` None: history forecasts only.

    `parallel` runs it beside prefill, `sequential` before it (TetriInfer 3.3.2). A request waits for its forecast until
    `timeout_s` after its arrival at the instance, in either mode; prefill may take longer, and what has come by its end
    counts. `shadow_model` is asked at the same time; nothing waits for it, and its forecasts decide nothing. `core`
    pins the predictor; never to a core of vLLM's worker, whose polling starves it (docs/benchmarks.md).
    """

    model: str | None = None
    shadow_model: str | None = None
    tracking_uri: str | None = None
    mode: str = "parallel"
    timeout_s: float = 2.0
    batch_size: int = 8
    cutting_limit_tokens: int = 512
    num_threads: int = 1
    core: int | None = None
    allow_other_target: bool = False

    def __post_init__(self) -> None:
        _require(
            self.shadow_model != "", "prediction.shadow_model", self.shadow_model, "a model URI or folder, or null"
        )
        _require(self.mode in ("parallel", "sequential"), "prediction.mode", self.mode, "parallel or sequential")
        _require(self.timeout_s > 0, "prediction.timeout_s", self.timeout_s, "above 0 seconds")
        _require(self.batch_size >= 1, "prediction.batch_size", self.batch_size, "1 or more")
        _require(self.num_threads >= 1, "prediction.num_threads", self.num_threads, "1 or more")


LINKS = ("auto", "direct")


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How KV caches travel, and how much of the pool may wait for that.

    `auto`: UCX chooses among all transports. `direct`: shared memory, instances on one host.

    Over TCP, UCX emulates a READ with messages that both sides must progress, on a thread that spins meanwhile; over
    shared memory the reader copies alone. `direct` gives up UCX's detection of dead peers, which has no shared memory.
    `pinned_budget`: share of a prefill instance's KV pool that may wait to be pulled; beyond it no prefill starts.
    """

    link: str = "auto"
    pinned_budget: float = 0.5

    def __post_init__(self) -> None:
        _require(self.link in LINKS, "transfer.link", self.link, " or ".join(LINKS))
        _require(0 < self.pinned_budget <= 1, "transfer.pinned_budget", self.pinned_budget, "above 0, at most 1")


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """Everything that the plugin of one instance is told.

    `url` is where gateways and peers reach the instance's API server; `gateways` are the base URLs it dials.
    """

    role: Role
    instance_id: str
    url: str
    gateways: tuple[str, ...] = ()
    order: OrderSettings = field(default_factory=OrderSettings)
    chunk: ChunkSettings = field(default_factory=ChunkSettings)
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    admit: AdmitSettings = field(default_factory=AdmitSettings)
    forecast: ForecastSettings = field(default_factory=ForecastSettings)
    prediction: PredictionSettings = field(default_factory=PredictionSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    report_interval_s: float = 0.1

    def __post_init__(self) -> None:
        _require(bool(self.instance_id), "instance_id", self.instance_id, "a non-empty name")
        _require(self.url.startswith(("http://", "https://")), "url", self.url, "an http(s) base URL")
        for gateway in self.gateways:
            _require(gateway.startswith(("http://", "https://")), "gateways", gateway, "http(s) base URLs")
        _require(self.report_interval_s > 0, "report_interval_s", self.report_interval_s, "above 0 seconds")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> InstanceSettings:
        """Parse JSON-like settings. Raises `ConfigurationError` naming the key that is unknown, missing or wrong."""
        return _parse(cls, raw, "")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict(to_dict())` is the same settings."""
        return asdict(self)


def _parse(kind: type[T], raw: Mapping[str, Any], prefix: str) -> T:
    """Build dataclass `kind` from `raw`, checking keys and types; `prefix` leads key names in messages."""
    if not isinstance(raw, Mapping):
        raise ConfigurationError(f"{prefix.rstrip('.') or 'settings'}={raw!r}: must be an object")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key in raw:
        if key not in known:
            raise ConfigurationError(f"unknown key {prefix}{key}; known keys: {', '.join(known)}")
    values = {key: _convert(hints[key], value, f"{prefix}{key}") for key, value in raw.items()}
    try:
        return kind(**values)
    except TypeError as error:  # a required key is missing
        raise ConfigurationError(f"{prefix or 'settings: '}{error}".replace("__init__() ", "")) from None


def _convert(hint: Any, value: Any, key: str) -> Any:
    if is_dataclass(hint):
        return _parse(hint, value, f"{key}.")  # type: ignore[arg-type]
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return None if value is None else _convert(inner[0], value, key)
    if origin is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ConfigurationError(f"{key}={value!r}: must be a list of strings")
        return tuple(value)
    if hint is Role:
        if value not in tuple(Role):
            raise ConfigurationError(f"{key}={value!r}: must be one of {', '.join(Role)}")
        return Role(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigurationError(f"{key}={value!r}: must be of type {hint.__name__}")
    return value
