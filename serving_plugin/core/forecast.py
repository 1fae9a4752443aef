"""Length forecasts: what is known about how many tokens a request will put out.

Definitions: docs/definitions.md, "Length forecasts". Standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

DEFAULT_GRANULARITY_TOKENS = 200
HEAVY_DECODE_OVER_TOKENS = 128
HEAVY_PREFILL_OVER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Half-open, finite range `[low_tokens, high_tokens)` of output lengths."""

    low_tokens: int
    high_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.low_tokens < self.high_tokens:
            raise ValueError(f"length range [{self.low_tokens}, {self.high_tokens}) needs 0 <= low < high")


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """Distribution over output lengths: bucket i is `[edges[i], edges[i + 1])` with `probabilities[i]`.

    Probabilities sum to one; inside a bucket the length counts as uniform. A bucket classifier's argmax is a one-hot
    forecast (`one_hot`). Source: TetriInfer 3.3.2 for buckets; the distribution is ours.
    """

    edges_tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        edges, shares = self.edges_tokens, self.probabilities
        if len(edges) != len(shares) + 1 or not shares:
            raise ValueError(f"{len(shares)} probabilities need {len(shares) + 1} edges, got {len(edges)}")
        if edges[0] < 0 or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"edges must rise from 0 or more: {edges}")
        if any(not 0.0 <= p <= 1.0 + 1e-6 for p in shares) or abs(sum(shares) - 1.0) > 1e-3:
            raise ValueError(f"probabilities must lie in [0, 1] and sum to 1, got sum {sum(shares):.6g}")

    @classmethod
    def one_hot(cls, bucket: LengthRange) -> Self:
        """The forecast of a classifier that names one bucket."""
        return cls((bucket.low_tokens, bucket.high_tokens), (1.0,))

    @classmethod
    def from_weights(cls, edges_tokens: Sequence[int], weights: Sequence[float]) -> Self:
        """Normalised forecast from non-negative weights (a softmax in float32 sums to one only nearly)."""
        total = float(sum(weights))
        if total <= 0:
            raise ValueError("weights sum to zero: no forecast")
        return cls(tuple(int(e) for e in edges_tokens), tuple(float(w) / total for w in weights))

    @property
    def is_one_hot(self) -> bool:
        """Whether one bucket holds all probability."""
        return max(self.probabilities) >= 1.0 - 1e-9

    def argmax_bucket(self) -> LengthRange:
        """The likeliest bucket (the paper's prediction); the shorter of two equal ones."""
        best = max(range(len(self.probabilities)), key=lambda i: (self.probabilities[i], -i))
        return LengthRange(self.edges_tokens[best], self.edges_tokens[best + 1])

    def quantile(self, q: float) -> int:
        """Smallest whole number of tokens x with P(length <= x) >= q, in a bucket that holds probability."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"quantile {q} is outside [0, 1]")
        reached, longest = 0.0, self.edges_tokens[0]
        for low, high, p in zip(self.edges_tokens, self.edges_tokens[1:], self.probabilities, strict=False):
            if p <= 0:
                continue
            if reached + p >= q - 1e-12:
                inside = max(0.0, (q - reached) / p)  # share of the bucket below the quantile
                return min(high - 1, max(low, low + _ceil(inside * (high - low)) - 1))
            reached, longest = reached + p, high - 1
        return longest  # probabilities sum to one only nearly

    def range(self, coverage: float) -> LengthRange:
        """Central interval that holds the length with probability `coverage`; the bucket itself when one-hot."""
        if not 0.0 < coverage <= 1.0:
            raise ValueError(f"coverage {coverage} is outside (0, 1]")
        if self.is_one_hot:
            return self.argmax_bucket()
        tail = (1.0 - coverage) / 2
        return LengthRange(self.quantile(tail), self.quantile(1.0 - tail) + 1)

    def probability_over(self, num_tokens: int) -> float:
        """P(length > num_tokens)."""
        over = 0.0
        for low, high, p in zip(self.edges_tokens, self.edges_tokens[1:], self.probabilities, strict=False):
            over += p * min(1.0, max(0.0, (high - 1 - num_tokens) / (high - low)))
        return over

    def survival(self, num_tokens: Sequence[int]) -> list[float]:
        """P(length > x) for each x of `num_tokens`, which rise: `probability_over` in one pass over the buckets."""
        result, bucket, over = [], 0, 1.0  # `over`: probability of the bucket in which x lies and of those after it
        edges, shares, last = self.edges_tokens, self.probabilities, len(self.probabilities)
        for x in num_tokens:
            low = x + 1  # the shortest of the longer lengths
            while bucket < last and edges[bucket + 1] <= low:
                over -= shares[bucket]
                bucket += 1
            if bucket == last or over < 0.0:
                result.append(0.0)
            elif low <= edges[bucket]:
                result.append(over)
            else:
                result.append(over - shares[bucket] * (low - edges[bucket]) / (edges[bucket + 1] - edges[bucket]))
        return result

    def is_heavy(self, over_tokens: int = HEAVY_DECODE_OVER_TOKENS) -> bool:
        """Heavy decode: P(length > threshold) >= 0.5; for a one-hot bucket, its midpoint over the threshold."""
        if self.is_one_hot:
            bucket = self.argmax_bucket()
            return (bucket.low_tokens + bucket.high_tokens) / 2 > over_tokens
        return self.probability_over(over_tokens) >= 0.5

    def given_more_than(self, num_output_tokens: int) -> Self:
        """The same distribution conditioned on length > `num_output_tokens`.

        Beyond the last edge nothing is known: the successor bucket, as wide as the last one, answers (one-hot).
        """
        start = num_output_tokens + 1
        if start >= self.edges_tokens[-1]:
            width = self.edges_tokens[-1] - self.edges_tokens[-2]
            low = self.edges_tokens[-1] + (start - self.edges_tokens[-1]) // width * width
            return type(self).one_hot(LengthRange(low, low + width))
        first = max(0, bisect_right(self.edges_tokens, start) - 1)
        edges = (max(start, self.edges_tokens[first]), *self.edges_tokens[first + 1 :])
        shares = list(self.probabilities[first:])
        low, high = self.edges_tokens[first], self.edges_tokens[first + 1]
        shares[0] *= (high - edges[0]) / (high - low)
        if sum(shares) <= 0:  # certain of less than is already out: uniform over what is left
            return type(self).from_weights(edges, [b - a for a, b in pairwise(edges)])
        return type(self).from_weights(edges, shares)

    def clipped(self, max_tokens: int) -> Self:
        """The forecast under a limit of `max_tokens`: mass beyond it lies on the limit itself.

        A one-hot bucket is cut at the limit and stays one-hot.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens {max_tokens} is below 1")
        end = max_tokens + 1
        if end >= self.edges_tokens[-1]:
            return self
        if self.is_one_hot:
            bucket = self.argmax_bucket()
            return type(self).one_hot(LengthRange(min(bucket.low_tokens, max_tokens), min(bucket.high_tokens, end)))
        edges, shares = [], []
        for low, high, p in zip(self.edges_tokens, self.edges_tokens[1:], self.probabilities, strict=False):
            if low < max_tokens:
                edges.append(low)
                shares.append(p * min(1.0, (max_tokens - low) / (high - low)))
        at_limit = max(0.0, sum(self.probabilities) - sum(shares))
        return type(self).from_weights([*edges, max_tokens, end], [*shares, at_limit])

    def regrouped(self, granularity_tokens: int) -> Self:
        """The same distribution over buckets `[0, G), [G, 2G), ...` (mass of a split bucket is shared evenly)."""
        num_buckets = -(-self.edges_tokens[-1] // granularity_tokens)
        weights = [0.0] * num_buckets
        for low, high, p in zip(self.edges_tokens, self.edges_tokens[1:], self.probabilities, strict=False):
            for bucket in range(low // granularity_tokens, -(-high // granularity_tokens)):
                left, right = bucket * granularity_tokens, (bucket + 1) * granularity_tokens
                weights[bucket] += p * (min(high, right) - max(low, left)) / (high - low)
        return type(self).from_weights([i * granularity_tokens for i in range(num_buckets + 1)], weights)

    def mean_tokens(self) -> float:
        """Expected output length in tokens."""
        pairs = zip(self.edges_tokens, self.edges_tokens[1:], self.probabilities, strict=False)
        return sum(p * (low + high - 1) / 2 for low, high, p in pairs)


def history_forecast(
    finished_lengths_tokens: Iterable[int],
    default_high_tokens: int,
    granularity_tokens: int = DEFAULT_GRANULARITY_TOKENS,
) -> LengthForecast:
    """Empirical distribution of recent lengths, for a request without a forecast.

    With no history yet every length below `default_high_tokens` counts as equally likely.
    Source: LightLLM Past-Future (arXiv 2507.10150) for the idea of history as the predictor.
    """
    lengths = list(finished_lengths_tokens)
    if not lengths:
        return LengthForecast((0, max(1, default_high_tokens)), (1.0,))
    num_buckets = max(lengths) // granularity_tokens + 1
    counts = [0] * num_buckets
    for length in lengths:
        counts[length // granularity_tokens] += 1
    return LengthForecast.from_weights([i * granularity_tokens for i in range(num_buckets + 1)], counts)


def refresh_range(
    forecast: LengthForecast,
    current: LengthRange,
    num_output_tokens: int,
    coverage: float,
    max_tokens: int | None = None,
) -> LengthRange:
    """The range in force once `num_output_tokens` are out: `current` until it is outgrown (out >= high), then the next.

    One-hot: the successor bucket that holds the true length now. Otherwise the conditional interval. Never beyond
    `max_tokens`, where the reply stops.
    """
    if num_output_tokens < current.high_tokens:
        return current
    if forecast.is_one_hot:
        width = current.high_tokens - current.low_tokens
        low = current.low_tokens + (num_output_tokens - current.low_tokens) // width * width
        following = LengthRange(low, low + width)
    else:
        following = forecast.given_more_than(num_output_tokens).range(coverage)
    if max_tokens is None or following.high_tokens <= max_tokens + 1:
        return following
    high = max(max_tokens, num_output_tokens) + 1
    return LengthRange(min(following.low_tokens, high - 1), high)


def _ceil(x: float) -> int:
    return -int(-(x - 1e-9) // 1)
