"""Prometheus metrics of a gateway, in a registry of their own. Every name starts with `tetri_`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from serving_plugin.control.monitor import Monitor
from serving_plugin.core.types import InstanceLoad, InstanceState, RequestRecord, Role

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_JCT_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

_LOAD_GAUGES: dict[str, Callable[[InstanceLoad], float]] = {
    "waiting_requests": lambda load: load.num_waiting,
    "loading_requests": lambda load: load.num_loading,
    "running_requests": lambda load: load.num_running,
    "waiting_prompt_tokens": lambda load: load.num_waiting_prompt_tokens,
    "vetoed_tokens": lambda load: load.num_vetoed_tokens,
    "total_blocks": lambda load: load.num_total_blocks,
    "free_blocks": lambda load: load.num_free_blocks,
    "pinned_blocks": lambda load: load.num_pinned_blocks,
    "heavy_decodes": lambda load: load.num_heavy_decodes,
    "light_decodes": lambda load: load.num_light_decodes,
    "busy_fraction": lambda load: load.busy_fraction,
    "role_epoch": lambda load: load.role_epoch,
}


class GatewayMetrics:
    """What the gateway counts itself, and a view of the monitor at scrape time."""

    def __init__(self, monitor: Monitor) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_InstanceCollector(monitor))
        self._requests = Counter("tetri_requests", "Finished requests by outcome", ["outcome"], registry=registry)
        self._whole = Counter(
            "tetri_whole_requests", "Requests run whole on one instance, by reason", ["reason"], registry=registry
        )
        self._output_tokens = Counter("tetri_output_tokens", "Output tokens sent to clients", registry=registry)
        self._ttft = Histogram(
            "tetri_ttft_seconds",
            "Arrival to first output token, at the gateway",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._jct = Histogram(
            "tetri_jct_seconds",
            "Arrival to last output token, at the gateway",
            buckets=_JCT_BUCKETS_S,
            registry=registry,
        )
        self._legs = Counter("tetri_legs", "Legs sent to instances", ["leg", "instance"], registry=registry)
        self._retries = Counter(
            "tetri_leg_retries", "Legs sent again after a failed connection", ["leg"], registry=registry
        )
        self._transfers = Counter(
            "tetri_kv_transfers", "KV transfers that decode instances reported", ["result"], registry=registry
        )
        self.open_requests = Gauge("tetri_open_requests", "Requests being served now", registry=registry)

    def count_leg(self, leg: str, instance: str) -> None:
        """A leg was sent."""
        self._legs.labels(leg, instance).inc()

    def count_retry(self, leg: str) -> None:
        """A leg was sent again."""
        self._retries.labels(leg).inc()

    def count_transfer(self, num_remote_tokens: int) -> None:
        """A decode instance pulled KV cache, or failed to and computed it again (then prefill was for nothing)."""
        self._transfers.labels("pulled" if num_remote_tokens else "recomputed").inc()

    def observe(self, record: RequestRecord) -> None:
        """A request ended."""
        self._requests.labels(record.outcome.value).inc()
        self._output_tokens.inc(record.num_output_tokens)
        if record.whole_reason is not None:
            self._whole.labels(record.whole_reason).inc()
        if record.first_token_s is not None:
            self._ttft.observe(record.first_token_s - record.arrival_s)
        if record.last_token_s is not None:
            self._jct.observe(record.last_token_s - record.arrival_s)

    def text(self) -> bytes:
        """The exposition format that Prometheus scrapes."""
        return generate_latest(self._registry)


class _InstanceCollector(Collector):
    """Gauges of connected instances, read from the monitor when scraped: one that left leaves no stale series."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[GaugeMetricFamily | InfoMetricFamily]:
        loads = self._monitor.loads()
        by_state = GaugeMetricFamily("tetri_instances", "Connected instances", labels=["role", "state"])
        for role in Role:
            for state in InstanceState:
                num = sum(1 for load in loads if load.role is role and load.state is state)
                by_state.add_metric([role.value, state.value], num)
        yield by_state
        for name in _LOAD_GAUGES:
            yield _load_gauge(name, loads)
        predictor = InfoMetricFamily("tetri_predictor", "Length predictor in use", labels=["instance"])
        for instance in self._monitor.instances():
            if instance.hello.predictor is not None:
                predictor.add_metric([instance.hello.instance_id], {"version": instance.hello.predictor})
        yield predictor


def _load_gauge(name: str, loads: list[InstanceLoad]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"tetri_instance_{name}", f"Last reported {name}", labels=["instance", "role"])
    for load in loads:
        gauge.add_metric([load.id, load.role.value], _LOAD_GAUGES[name](load))
    return gauge
