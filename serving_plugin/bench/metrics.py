"""Metrics over `RequestRecord`s: pure functions, live and simulated runs alike. Units: seconds.

Definitions: docs/definitions.md "Metrics".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from serving_plugin.core.types import Outcome, RequestRecord

BOOTSTRAP_RESAMPLES = 2000

# Source: TetriInfer figures 11-15: change of (TTFT, JCT, resource time), printed perf/$, and the perf/$ that the
# printed resource times imply (1 / (1 + change)); the two columns do not agree. None: not quantified.
PAPER_RESULTS: dict[str, dict[str, float | None]] = {
    "lpld": {"ttft": -0.44, "jct": -0.40, "resource_time": 0.0, "perf_per_dollar": 1.4, "implied": 1.0},
    "lphd": {"ttft": -0.97, "jct": -0.47, "resource_time": -0.38, "perf_per_dollar": 2.4, "implied": 1.61},
    "hpld": {"ttft": -0.09, "jct": -0.23, "resource_time": 0.43, "perf_per_dollar": 0.86, "implied": 0.70},
    "hphd": {"ttft": None, "jct": -0.19, "resource_time": 0.07, "perf_per_dollar": 1.1, "implied": 0.93},
    "mixed": {"ttft": -0.85, "jct": -0.50, "resource_time": -0.21, "perf_per_dollar": 1.9, "implied": 1.27},
}

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of a sample; `mean_low`/`mean_high` are the 95 % bootstrap interval of the mean."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    mean_low: float
    mean_high: float


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level of a good request; None means no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """One run's figures. Distributions are None without a sample, resource time without known instances."""

    num_requests: int
    num_ok: int
    num_errors: int
    num_rejected: int
    num_whole: int
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: Distribution | None
    itl_s: Distribution | None
    first_gap_s: Distribution | None
    tpot_s: Distribution | None
    jct_s: Distribution | None
    resource_time_s: float | None
    resource_time_by_instance_s: dict[str, float]
    makespan_s: float | None
    output_tokens_per_s: float | None
    good_share: float | None


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Ours over theirs, one ratio of means per pair of runs; the one-sided 95 % bounds need two pairs or more."""

    ratios: tuple[float, ...]
    mean: float
    lower_95: float | None
    upper_95: float | None

    def meets(self, goal: float, min_pairs: int = 5) -> bool:
        """Whether the 95 % upper bound lies under `goal`, with enough pairs to say so."""
        return len(self.ratios) >= min_pairs and self.upper_95 is not None and self.upper_95 < goal


def ttft_s(record: RequestRecord) -> float | None:
    """Client sends -> first output token at the client."""
    return None if record.first_token_s is None else record.first_token_s - record.arrival_s


def jct_s(record: RequestRecord) -> float | None:
    """Client sends -> last token, of a request that finished."""
    if record.outcome is not Outcome.OK or record.last_token_s is None:
        return None
    return record.last_token_s - record.arrival_s


def tpot_s(record: RequestRecord) -> float | None:
    """(JCT - TTFT) / (tokens - 1); None for a request of one token."""
    jct, ttft = jct_s(record), ttft_s(record)
    if jct is None or ttft is None or record.num_output_tokens < 2:
        return None
    return (jct - ttft) / (record.num_output_tokens - 1)


def gaps_s(record: RequestRecord) -> list[float]:
    """Gaps between tokens at the client, the one between tokens 1 and 2 first."""
    return [later - earlier for earlier, later in pairwise(record.token_times_s)]


def summarise(values: Iterable[float], seed: int = 0) -> Distribution | None:
    """Summary of `values`; None when there are none. Percentiles interpolate linearly."""
    sample = np.asarray(list(values), dtype=float)
    if sample.size == 0:
        return None
    p50, p90, p99 = (float(x) for x in np.percentile(sample, (50, 90, 99)))
    low, high = bootstrap_mean_interval(sample, seed=seed)
    return Distribution(int(sample.size), float(sample.mean()), p50, p90, p99, float(sample.max()), low, high)


def bootstrap_mean_interval(
    values: Sequence[float] | np.ndarray, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; deterministic by `seed`."""
    means = _bootstrap_means(np.asarray(values, dtype=float), seed)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(means, (tail, 100 - tail))
    return float(low), float(high)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> PairedRatio | None:
    """Per-pair ratios with one-sided 95 % bootstrap bounds of their mean; None without a pair."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} runs against {len(theirs)}: not pairs")
    if not ours or min(theirs) <= 0:
        return None
    ratios = tuple(a / b for a, b in zip(ours, theirs, strict=True))
    lower = upper = None
    if len(ratios) > 1:
        lower, upper = (float(x) for x in np.percentile(_bootstrap_means(np.asarray(ratios), seed), (5, 95)))
    return PairedRatio(ratios, float(np.mean(ratios)), lower, upper)


def _bootstrap_means(sample: np.ndarray, seed: int) -> np.ndarray:
    """Means of resamples, `(BOOTSTRAP_RESAMPLES,)`; in slices, since a run has tens of thousands of gaps."""
    rng = np.random.default_rng(seed)
    if sample.size > 2000:  # the mean of a large sample is normal: the same interval without 2,000 large resamples
        return rng.normal(sample.mean(), sample.std(ddof=1) / np.sqrt(sample.size), BOOTSTRAP_RESAMPLES)
    picks = rng.integers(0, sample.size, size=(BOOTSTRAP_RESAMPLES, sample.size))
    means: np.ndarray = sample[picks].mean(axis=1)
    return means


def union_length_s(intervals: Iterable[Interval]) -> float:
    """Length of the union of `intervals`; empty and reversed ones count nothing."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if stop > max(start, end):
            total += stop - max(start, end)
            end = stop
    return total


def busy_intervals(record: RequestRecord) -> dict[str, list[Interval]]:
    """When each instance had an unfinished leg of this request, or its KV pinned for another instance.

    Prefill: arrival -> KV pulled (first token where the transfer is not known). Decode: dispatch -> last token.
    One instance for both: arrival -> last token.
    """
    known = [t for t in (record.last_token_s, record.first_token_s, record.prefill_end_s) if t is not None]
    prefill, decode = record.prefill_instance, record.decode_instance
    if not known or (prefill is None and decode is None):
        return {}
    end_s = max(known)
    if prefill is None or decode is None or prefill == decode:
        return {prefill or decode or "": [(record.arrival_s, end_s)]}
    pulled_s = _first_known(record.transfer_end_s, record.first_token_s, end_s)
    dispatched_s = _first_known(record.dispatch_s, record.prefill_end_s, record.first_token_s, record.arrival_s)
    return {prefill: [(record.arrival_s, pulled_s)], decode: [(dispatched_s, end_s)]}


def _first_known(*times_s: float | None) -> float:
    return next(t for t in times_s if t is not None)


def resource_time_by_instance_s(records: Iterable[RequestRecord]) -> dict[str, float]:
    """Wall seconds with work, per instance."""
    intervals: dict[str, list[Interval]] = defaultdict(list)
    for record in records:
        for instance, spans in busy_intervals(record).items():
            intervals[instance] += spans
    return {instance: union_length_s(spans) for instance, spans in sorted(intervals.items())}


def makespan_s(records: Sequence[RequestRecord]) -> float | None:
    """First send -> last token of the run."""
    ends = [r.last_token_s for r in records if r.last_token_s is not None]
    return max(ends) - min(r.arrival_s for r in records) if ends else None


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Whether a finished request met the service level."""
    ttft, tpot = ttft_s(record), tpot_s(record)
    if jct_s(record) is None or ttft is None:
        return False
    in_ttft = slo.ttft_s is None or ttft <= slo.ttft_s
    return in_ttft and (slo.tpot_s is None or tpot is None or tpot <= slo.tpot_s)


def measure(records: Sequence[RequestRecord], slo: Slo | None = None) -> RunMetrics:
    """All figures of one run. Latencies are those of finished requests; errors are counted beside them."""
    finished = [r for r in records if r.outcome is Outcome.OK]
    gaps = [gaps_s(r) for r in finished]
    span_s = makespan_s(records)
    by_instance = resource_time_by_instance_s(records)
    num_output_tokens = sum(r.num_output_tokens for r in finished)
    return RunMetrics(
        num_requests=len(records),
        num_ok=len(finished),
        num_errors=sum(r.outcome in (Outcome.ERROR, Outcome.CANCELLED) for r in records),
        num_rejected=sum(r.outcome is Outcome.REJECTED for r in records),
        num_whole=sum(r.whole_reason is not None for r in records),
        num_prompt_tokens=sum(r.num_prompt_tokens for r in finished),
        num_output_tokens=num_output_tokens,
        ttft_s=summarise(_known(ttft_s(r) for r in finished)),
        itl_s=summarise(gap for request_gaps in gaps for gap in request_gaps),
        first_gap_s=summarise(request_gaps[0] for request_gaps in gaps if request_gaps),
        tpot_s=summarise(_known(tpot_s(r) for r in finished)),
        jct_s=summarise(_known(jct_s(r) for r in finished)),
        resource_time_s=sum(by_instance.values()) if by_instance else None,
        resource_time_by_instance_s=by_instance,
        makespan_s=span_s,
        output_tokens_per_s=num_output_tokens / span_s if span_s else None,
        good_share=sum(is_good(r, slo) for r in records) / len(records) if slo and records else None,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]
