"""Drift watch: does what the length predictor says still hold for the replies that come? Standard library only.

Definitions: docs/definitions.md, "Drift watch" and "Shadow". No clock: everything is counted in finished requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast

DEFAULT_BAND = 0.10
DEFAULT_WINDOW = 200
DEFAULT_MIN_SAMPLES = 50
RETURN_SHARE = 0.6  # the band of the return, as a share of the band that was left: hysteresis
STANDARD_ERRORS = 1.645  # beyond the band's edge: a one-sided 95 % bound
MAX_WINDOW = 10_000
NUM_RANKED = 200  # newest requests in the rank error: it compares all pairs
_MAX_MODEL_CHARS = 200
_MAX_TOKENS = 1 << 31
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ForecastSummary:
    """What one model said of one request, under the request's limit. Output tokens; see `summarise`.

    `[low_tokens, high_tokens)` is the central interval at `coverage`, `upper_tokens` the one-sided quantile at
    `coverage`. `is_limited`: that quantile is the request's own limit, so the reply cannot pass it.
    """

    model: str
    is_shadow: bool
    coverage: float
    mean_tokens: float
    median_tokens: int
    low_tokens: int
    high_tokens: int
    upper_tokens: int
    is_limited: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, as it travels with a prefill leg's answer."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: object) -> Self:
        """Read what another process sent.

        Raises:
            ValueError: not an object with exactly these keys, a value of another type, or one out of its bounds.
        """
        if not isinstance(raw, Mapping):
            raise ValueError(f"a forecast summary is a {type(raw).__name__}, needs an object")
        names = [f.name for f in fields(cls)]
        if sorted(map(str, raw)) != sorted(names):
            raise ValueError(f"a forecast summary has the keys {sorted(map(str, raw))[:20]}, needs {names}")
        for f in fields(cls):
            value = raw[f.name]
            if type(value).__name__ != f.type and not (f.type == "float" and type(value) is int):
                raise ValueError(f"{f.name} of a forecast summary is a {type(value).__name__}, needs {f.type}")
        summary = cls(**raw)
        if not (summary.model.isprintable() and 0 < len(summary.model) <= _MAX_MODEL_CHARS):
            raise ValueError(f"model of a forecast summary needs 1 to {_MAX_MODEL_CHARS} printable characters")
        if not 0 < summary.coverage < 1:  # NaN is refused too, here and below
            raise ValueError(f"coverage of a forecast summary is {summary.coverage}, needs to be between 0 and 1")
        if not (0 <= summary.mean_tokens < _MAX_TOKENS and 0 <= summary.upper_tokens < _MAX_TOKENS):
            raise ValueError(f"mean and upper tokens of a forecast summary need 0 to {_MAX_TOKENS}")
        if not 0 <= summary.low_tokens <= summary.median_tokens < summary.high_tokens <= _MAX_TOKENS:
            raise ValueError(f"a forecast summary needs 0 <= low <= median < high <= {_MAX_TOKENS} tokens")
        return summary


def summarise(
    forecast: LengthForecast, model: str, coverage: float, max_tokens: int, is_shadow: bool = False
) -> ForecastSummary:
    """What `forecast` says of a reply that stops at `max_tokens`: longer ones end *on* the limit.

    Quantiles are those of the whole forecast, cut at the limit: for a distribution the same as those of `clipped`, and
    for a one-hot bucket the mass beyond the limit lies on it too.

    Raises:
        ValueError: `coverage` outside (0, 1), or `max_tokens` below 1.
    """
    if not 0 < coverage < 1:
        raise ValueError(f"coverage {coverage} is outside (0, 1)")
    tail = (1.0 - coverage) / 2
    upper_tokens = forecast.quantile(coverage)
    return ForecastSummary(
        model=model,
        is_shadow=is_shadow,
        coverage=coverage,
        mean_tokens=forecast.clipped(max_tokens).mean_tokens(),
        median_tokens=min(forecast.quantile(0.5), max_tokens),
        low_tokens=min(forecast.quantile(tail), max_tokens),
        high_tokens=min(forecast.quantile(1.0 - tail), max_tokens) + 1,
        upper_tokens=min(upper_tokens, max_tokens),
        is_limited=upper_tokens >= max_tokens,
    )


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """When a model's forecasts count as drifted. Sizes are finished requests, bands are shares of them.

    Trusted until |rolling coverage - nominal coverage| is over `band` by more than chance, then not until it is within
    `return_band`; both with at least `min_samples` (`next_trust`). The nominal coverage comes with each summary, so
    that gateway and instance cannot disagree about it. `enabled` False: forecasts are measured and always trusted.
    """

    window: int = DEFAULT_WINDOW
    min_samples: int = DEFAULT_MIN_SAMPLES
    band: float = DEFAULT_BAND
    return_band: float = DEFAULT_BAND * RETURN_SHARE
    enabled: bool = True

    def __post_init__(self) -> None:
        _require(1 <= self.window <= MAX_WINDOW, "window", self.window, f"1 to {MAX_WINDOW} requests")
        _require(
            1 <= self.min_samples <= self.window, "min_samples", self.min_samples, f"1 to the window of {self.window}"
        )
        _require(0 < self.band < 1, "band", self.band, "between 0 and 1 (0 turns the watch off)")
        _require(0 < self.return_band <= self.band, "return_band", self.return_band, f"over 0, up to {self.band}")

    @classmethod
    def of(cls, band: float, window: int) -> Self:
        """Settings from the two that a user sets; `band` 0 turns the watch off.

        Raises:
            ConfigurationError: one of them is out of its bounds.
        """
        min_samples = max(1, min(DEFAULT_MIN_SAMPLES, window))
        if band == 0:
            return cls(window, min_samples, enabled=False)
        return cls(window, min_samples, band, band * RETURN_SHARE)


def _require(ok: bool, key: str, value: object, limit: str) -> None:
    if not ok:
        raise ConfigurationError(f"drift_{key}={value!r}: must be {limit}")


def next_trust(
    is_trusted: bool, coverage: float | None, nominal: float, num_samples: int, settings: DriftSettings
) -> bool:
    """Whether forecasts are trusted from now on; `coverage` and `nominal` are means over the `num_samples` newest.

    Trust is lost where the one-sided 95 % binomial bound (normal approximation) lies outside the band. Where the band
    reaches to 1, too much coverage is no drift: then it does not stand in the way of a return either.
    """
    if not settings.enabled:
        return True
    if coverage is None or num_samples < settings.min_samples:
        return is_trusted
    band = settings.band if is_trusted else settings.return_band
    low, high = nominal - band, nominal + band
    if is_trusted:
        low, high = low - _chance(low, num_samples), high + _chance(high, num_samples)
    can_be_over = nominal + settings.band < 1 - _ROUNDING
    return coverage >= low - _ROUNDING and not (can_be_over and coverage > high + _ROUNDING)


def _chance(share: float, num_samples: int) -> float:
    """How far chance alone carries a rolling coverage from the true one, `share`."""
    share = min(max(share, 0.0), 1.0)
    return STANDARD_ERRORS * math.sqrt(share * (1.0 - share) / num_samples)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation (tau-b: ties count as neither) of pairs; None where one side does not vary."""
    agree = disagree = ties_first = ties_second = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[i + 1 :]:
            product = (a - c) * (b - d)
            agree += product > 0
            disagree += product < 0
            ties_first += a == c
            ties_second += b == d
    total = len(pairs) * (len(pairs) - 1) // 2
    varied = (total - ties_first) * (total - ties_second)
    return (agree - disagree) / math.sqrt(varied) if varied else None


@dataclass(frozen=True, slots=True)
class Transition:
    """Trust was lost (`is_trusted` False) or came back, with the figures that decided."""

    is_trusted: bool
    coverage: float
    nominal: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class DriftFigures:
    """A watch at one moment. None: nothing to tell from yet. `tau` costs a comparison of all pairs: read it seldom.

    `num_observed` counts all requests ever, `num_samples` those that the coverage stands on; `mae_tokens` is the mean
    absolute error of the median, `interval_tokens` the mean width of the central interval.
    """

    model: str
    is_shadow: bool
    is_trusted: bool
    num_observed: int
    num_samples: int
    coverage: float | None
    nominal_coverage: float | None
    mae_tokens: float | None
    interval_tokens: float | None
    tau: float | None


@dataclass(slots=True)
class DriftWatch:
    """The newest finished requests of one model, and whether its forecasts are trusted. One owner, no locks.

    Coverage leaves out requests whose upper bound is their own limit: they are covered whatever the forecast was worth.
    A transition empties the coverage window, so that what was seen before neither holds nor releases. A shadow's watch
    measures only: it is always "trusted".
    """

    model: str
    is_shadow: bool
    settings: DriftSettings
    is_trusted: bool = True
    num_observed: int = 0
    _covered: deque[tuple[bool, float]] = field(init=False, repr=False)  # covered, nominal coverage
    _seen: deque[tuple[ForecastSummary, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._covered = deque(maxlen=self.settings.window)
        self._seen = deque(maxlen=self.settings.window)

    def observe(self, summary: ForecastSummary, actual_tokens: int) -> Transition | None:
        """Take in a finished request; a transition if this one turned the decision."""
        self.num_observed += 1
        self._seen.append((summary, actual_tokens))
        if summary.is_limited:
            return None
        self._covered.append((actual_tokens <= summary.upper_tokens, summary.coverage))
        if self.is_shadow:
            return None
        coverage, nominal, num_samples = self._coverage()
        trusted = next_trust(self.is_trusted, coverage, nominal, num_samples, self.settings)
        if trusted == self.is_trusted:
            return None
        self.is_trusted = trusted
        self._covered.clear()
        return Transition(trusted, coverage, nominal, num_samples)

    def _coverage(self) -> tuple[float, float, int]:
        """Rolling one-sided coverage, its nominal value, and how many requests they stand on (1 or more)."""
        num_samples = len(self._covered)
        covered = sum(is_covered for is_covered, _ in self._covered)
        return covered / num_samples, sum(nominal for _, nominal in self._covered) / num_samples, num_samples

    def figures(self) -> DriftFigures:
        """Everything that is shown of the watch."""
        coverage, nominal, num_samples = self._coverage() if self._covered else (None, None, 0)
        seen = self._seen
        errors = [abs(summary.median_tokens - actual) for summary, actual in seen]
        widths = [summary.high_tokens - summary.low_tokens for summary, _ in seen]
        return DriftFigures(
            model=self.model,
            is_shadow=self.is_shadow,
            is_trusted=self.is_trusted,
            num_observed=self.num_observed,
            num_samples=num_samples,
            coverage=coverage,
            nominal_coverage=nominal,
            mae_tokens=sum(errors) / len(errors) if errors else None,
            interval_tokens=sum(widths) / len(widths) if widths else None,
            tau=kendall_tau([(summary.mean_tokens, float(actual)) for summary, actual in seen][-NUM_RANKED:]),
        )


class DriftWatches:
    """Watches by model and shadow: the forecasts of a cluster are trusted while every watched champion's are.

    A model of which nothing came in the last `settings.min_samples` finished requests is forgotten, so that one that is
    served no more does not hold the decision.
    """

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self._watches: dict[tuple[str, bool], DriftWatch] = {}
        self._last_seen: dict[tuple[str, bool], int] = {}
        self._num_requests = 0

    @property
    def is_trusted(self) -> bool:
        """Whether forecasts may be used."""
        return all(watch.is_trusted for watch in self._watches.values())

    def observe(self, summaries: Sequence[ForecastSummary], actual_tokens: int) -> list[tuple[str, Transition]]:
        """Take in a finished request of `actual_tokens` output tokens; (model, transition) of each that turned."""
        if not summaries:
            return []
        self._num_requests += 1
        turned: list[tuple[str, Transition]] = []
        for summary in summaries:
            key = (summary.model, summary.is_shadow)
            watch = self._watches.setdefault(key, DriftWatch(*key, self._settings))
            self._last_seen[key] = self._num_requests
            transition = watch.observe(summary, actual_tokens)
            if transition is not None:
                turned.append((summary.model, transition))
        self._forget_unseen()
        return turned

    def figures(self) -> list[DriftFigures]:
        """Figures of every model, champions first."""
        return [self._watches[key].figures() for key in sorted(self._watches, key=lambda key: (key[1], key[0]))]

    def _forget_unseen(self) -> None:
        oldest = self._num_requests - self._settings.min_samples
        for key in [key for key, number in self._last_seen.items() if number <= oldest]:
            del self._watches[key], self._last_seen[key]
