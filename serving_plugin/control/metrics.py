"""Prometheus metrics of a gateway, in a registry of their own. Every name starts with `tetri_`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from serving_plugin.control.forecasts import ForecastMonitor
from serving_plugin.control.monitor import Monitor
from serving_plugin.core.drift import DriftFigures
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

_FORECAST_GAUGES: dict[str, tuple[str, Callable[[DriftFigures], float | None]]] = {
    "coverage": ("Share of recent replies within the forecast's upper bound", lambda figures: figures.coverage),
    "nominal_coverage": ("What the rolling coverage should be", lambda figures: figures.nominal_coverage),
    "mae_tokens": ("Mean absolute error of the forecast's median", lambda figures: figures.mae_tokens),
    "interval_tokens": ("Mean width of the forecast's central interval", lambda figures: figures.interval_tokens),
    "kendall_tau": ("Rank correlation of forecast mean and actual length", lambda figures: figures.tau),
}


class GatewayMetrics:
    """What the gateway counts itself, and a view of monitor and drift watch at scrape time."""

    def __init__(self, monitor: Monitor, forecasts: ForecastMonitor) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_InstanceCollector(monitor))
        registry.register(_ForecastCollector(forecasts))
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
        self._relinquished = Counter(
            "tetri_relinquished",
            "Requests that a decode instance without room gave back, to be bound elsewhere",
            ["instance"],
            registry=registry,
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

    def count_relinquished(self, instance: str) -> None:
        """A decode instance without room gave a request back, to be bound elsewhere with its KV cache."""
        self._relinquished.labels(instance).inc()

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


class _ForecastCollector(Collector):
    """The drift watch when scraped: a model that is served no more leaves no stale series."""

    def __init__(self, forecasts: ForecastMonitor) -> None:
        self._forecasts = forecasts

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        forecasts, all_figures = self._forecasts, self._forecasts.figures()
        trusted = GaugeMetricFamily(
            "tetri_forecast_trusted", "1: length forecasts are in use; 0: they drifted, history is"
        )
        trusted.add_metric([], int(forecasts.is_trusted))
        yield trusted
        transitions = CounterMetricFamily(
            "tetri_forecast_transitions", "Falls back to history, and returns to forecasts", labels=["to"]
        )
        for to, number in forecasts.num_transitions.items():
            transitions.add_metric([to], number)
        yield transitions
        malformed = CounterMetricFamily("tetri_forecast_malformed", "Forecast summaries that could not be read")
        malformed.add_metric([], forecasts.num_malformed)
        yield malformed
        observed = CounterMetricFamily(
            "tetri_forecast_observed", "Finished requests with a forecast", labels=["model", "shadow"]
        )
        for figures in all_figures:
            observed.add_metric(_model_labels(figures), figures.num_observed)
        yield observed
        for name, (text, value_of) in _FORECAST_GAUGES.items():
            gauge = GaugeMetricFamily(f"tetri_forecast_{name}", text, labels=["model", "shadow"])
            for figures in all_figures:
                value = value_of(figures)
                if value is not None:
                    gauge.add_metric(_model_labels(figures), value)
            yield gauge


def _model_labels(figures: DriftFigures) -> list[str]:
    return [figures.model, str(figures.is_shadow).lower()]


def _load_gauge(name: str, loads: list[InstanceLoad]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"tetri_instance_{name}", f"Last reported {name}", labels=["instance", "role"])
    for load in loads:
        gauge.add_metric([load.id, load.role.value], _LOAD_GAUGES[name](load))
    return gauge
