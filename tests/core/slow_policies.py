"""The admission policies written down as slowly as docs/definitions.md reads: what the fast ones are tested against."""

from itertools import pairwise
from math import sqrt
from statistics import NormalDist

from serving_plugin.core.types import num_blocks


def slow_landing(new, pool):
    return num_blocks(new.num_prompt_tokens, pool.block_size_tokens) - new.num_cached_blocks + 1 <= pool.num_free_blocks


def at_low(new, pool):
    tokens = new.num_prompt_tokens + new.length_range.low_tokens
    return num_blocks(tokens, pool.block_size_tokens) - new.num_cached_blocks


def slow_static(new, pool):
    return at_low(new, pool) <= pool.num_free_blocks


def slow_static_net(new, pool):
    size = pool.block_size_tokens
    growth = 0
    for q in pool.active:
        growth += max(0, num_blocks(q.num_prompt_tokens + q.length_range.low_tokens, size) - q.num_held_blocks)
    return at_low(new, pool) <= pool.num_free_blocks - growth


def left(q):
    return max(1, q.length_range.high_tokens - q.num_output_tokens)


def slow_dynamic(new, pool):
    def blocks(tokens):
        return num_blocks(tokens, pool.block_size_tokens)

    r = min(left(q) for q in pool.active)
    sums = []
    for s in (s for s in pool.active if left(s) == r):
        others = sum(blocks(q.num_prompt_tokens + q.num_output_tokens + r) for q in pool.active if q is not s)
        sums.append(others + blocks(new.num_prompt_tokens + min(r, new.length_range.high_tokens)))
    return max(sums) - new.num_cached_blocks <= pool.num_total_blocks


def slow_peak(new, pool):
    batch = [(left(q), q.num_prompt_tokens + q.num_output_tokens) for q in pool.active]
    batch.append((new.length_range.high_tokens, new.num_prompt_tokens))
    return all(
        sum(num_blocks(tokens + t, pool.block_size_tokens) for other, tokens in batch if other >= t)
        <= pool.num_total_blocks
        for t in {t for t, _ in batch}
    )


def probability_of_lengths(q):
    """{length: probability}: every length of a bucket alike, every length of a range without a forecast."""
    if q.forecast is None:
        low, high = q.length_range.low_tokens, q.length_range.high_tokens
        return dict.fromkeys(range(low, high), 1 / (high - low))
    edges = q.forecast.edges_tokens
    buckets = zip(edges, edges[1:], q.forecast.probabilities, strict=False)
    return {length: p / (high - low) for low, high, p in buckets for length in range(low, high)}


def share_alive(q, out, tokens):
    """P(length > out + tokens | length > out); of one that outgrew its forecast, by the bucket that follows."""
    lengths = probability_of_lengths(q)
    if sum(p for length, p in lengths.items() if length > out) <= 1e-6:
        edges = q.forecast.edges_tokens if q.forecast else (q.length_range.low_tokens, q.length_range.high_tokens)
        if out + 1 < edges[-1]:  # the forecast gives no probability to what is left of it: all of that alike
            lengths = dict.fromkeys(range(out + 1, edges[-1]), 1.0)
        else:
            low, width = edges[-1], edges[-1] - edges[-2]
            while low + width <= out + 1:
                low += width
            lengths = dict.fromkeys(range(low, low + width), 1.0)
    over = sum(p for length, p in lengths.items() if length > out)
    return sum(p for length, p in lengths.items() if length > out + tokens) / over


def intervals(block_size_tokens, end):
    """(begin, end] in tokens from now, up to `end` tokens: one block, two, three, then each half as far again."""
    blocks = [0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63, 94, 141, 211]  # far enough for what tests do
    cuts = [n * block_size_tokens for n in blocks]
    assert cuts[-1] >= end
    return [(begin, stop) for begin, stop in pairwise(cuts) if begin < end]


def longest(q, out):
    """The longest that the forecast gives any room for, or the end of the bucket that follows it."""
    edges = q.forecast.edges_tokens if q.forecast else (q.length_range.low_tokens, q.length_range.high_tokens)
    high, width = edges[-1], edges[-1] - edges[-2]
    while high <= out + 1:
        high += width
    return high - 1


def expected_needs(new, pool):
    """Blocks needed in each interval, but for a probability of `overflow_probability`; never more than their sum."""
    z = NormalDist().inv_cdf(1 - pool.overflow_probability)
    size = pool.block_size_tokens
    batch = [(q, q.num_output_tokens) for q in pool.active] + [(new, 0)]
    needs = []
    for begin, end in intervals(size, max(longest(q, out) - out for q, out in batch)):
        mean = variance = most = 0
        for q, out in batch:
            share = share_alive(q, out, begin)
            if share < 1e-9:
                continue
            blocks = num_blocks(q.num_prompt_tokens + min(out + end, longest(q, out)), size)
            mean += share * blocks
            variance += share * max(0.0, 1 - share) * blocks * blocks
            most += blocks
        needs.append(min(mean + z * sqrt(variance), most))
    return needs


def mean_needs(new, pool):
    """Mean of the blocks in use when so many tokens more have been put out, for every number of them."""
    size = pool.block_size_tokens
    batch = [(q, q.num_output_tokens) for q in pool.active] + [(new, 0)]
    return [
        sum(
            # To put out the t-th token from now a reply must be longer than t - 1.
            share_alive(q, out, t - 1) * num_blocks(q.num_prompt_tokens + out + t, size)
            for q, out in batch
        )
        for t in range(1, max(longest(q, out) - out for q, out in batch) + 1)
    ]


def slow_expected(new, pool):
    return max(expected_needs(new, pool)) <= pool.num_total_blocks


def on_the_edge(new, pool):
    """Whether rounding decides reserve_expected."""
    total = pool.num_total_blocks
    return any(need != total and abs(need - total) < 1e-6 for need in expected_needs(new, pool))


# Each on an instance that is not empty; the landing rule is part of all.
SLOW_POLICIES = {
    "greedy": slow_landing,
    "reserve_static": lambda new, pool: slow_landing(new, pool) and slow_static(new, pool),
    "reserve_static_net": lambda new, pool: slow_landing(new, pool) and slow_static_net(new, pool),
    "reserve_dynamic": lambda new, pool: slow_landing(new, pool) and slow_dynamic(new, pool),
    "reserve_peak": lambda new, pool: slow_landing(new, pool) and slow_peak(new, pool),
    "reserve_expected": lambda new, pool: slow_landing(new, pool) and slow_expected(new, pool),
}
