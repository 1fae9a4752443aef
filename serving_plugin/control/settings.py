"""Settings of a gateway. Standard library and `core` only."""

from __future__ import annotations

from dataclasses import dataclass, fields

from serving_plugin.core.drift import DEFAULT_BAND, DEFAULT_WINDOW, DriftSettings
from serving_plugin.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`request_timeout_s` bounds a whole leg, queueing included, so it is generous; connecting is bounded apart.

    `place_wait_s`: how long a request waits while every prefill instance is over its pinned budget, before 429.
    `drift_band`: how far the coverage of length forecasts over the last `drift_window` finished requests may lie from
    the nominal one (a share) before history takes their place; 0 turns that off.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    gateway_id: str = "gateway"
    place: str = "least_load"
    bypass: str = "never"
    max_open_requests: int = 1024
    max_body_bytes: int = 32 << 20
    history_size: int = 10_000
    connect_timeout_s: float = 3.0
    request_timeout_s: float = 3600.0
    place_wait_s: float = 5.0
    broadcast_interval_s: float = 0.1
    shutdown_timeout_s: float = 3.0
    drift_band: float = DEFAULT_BAND
    drift_window: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value <= 0 and field.name != "drift_band":
                raise ConfigurationError(f"gateway setting {field.name} is {value}, needs more than 0")
        self.drift()

    def drift(self) -> DriftSettings:
        """Settings of the drift watch. Raises `ConfigurationError` if a value is out of its bounds."""
        return DriftSettings.of(self.drift_band, self.drift_window)
