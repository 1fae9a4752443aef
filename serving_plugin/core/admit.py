"""Admit: whether a decode instance takes a waiting request into its batch now. Pure arithmetic; standard library only.

Definitions: docs/definitions.md, "Blocks on a decode instance". Source: TetriInfer 3.4 for greedy, reserve_static and
reserve_dynamic; reserve_static_net, reserve_peak and reserve_expected are ours. Lengths are ranges or distributions;
the true length is never seen. A policy judges one request; `admit_queue` says who of a whole queue is admitted now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from statistics import NormalDist

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast, LengthRange
from serving_plugin.core.types import num_blocks


@dataclass(frozen=True, slots=True)
class ActiveDecode:
    """A request that runs, loads or waits loaded; `length_range` is in force now, `num_held_blocks` are its own.

    One that was preempted and waits to return counts with the blocks that it will take first.
    `forecast`: the distribution that the range came from; None: every length in the range is equally likely.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    length_range: LengthRange
    num_held_blocks: int
    forecast: LengthForecast | None = None


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that waits for admission, nothing put out yet.

    `num_cached_blocks`: blocks of its prompt that the local prefix cache has *and* a live request holds. A cached block
    nobody holds is already counted in the pool's free blocks.
    """

    num_prompt_tokens: int
    length_range: LengthRange
    num_cached_blocks: int = 0
    forecast: LengthForecast | None = None


@dataclass(slots=True)
class _Use:
    """Blocks in use in each interval ahead (`_INTERVAL_ENDS_BLOCKS`): mean, variance, and the sum if all are long."""

    means: list[float] = field(default_factory=list)
    variances: list[float] = field(default_factory=list)
    most: list[int] = field(default_factory=list)

    def add(self, ahead: Sequence[tuple[float, int]]) -> None:
        """One more request: (probability that it runs in the interval, blocks that it then holds) per interval."""
        num_more = len(ahead) - len(self.means)
        if num_more > 0:
            self.means += [0.0] * num_more
            self.variances += [0.0] * num_more
            self.most += [0] * num_more
        for i, (share, blocks) in enumerate(ahead):
            need = share * blocks
            self.means[i] += need
            self.variances[i] += need * (blocks - need)
            self.most[i] += blocks

    def with_one(self, ahead: Sequence[tuple[float, int]]) -> _Use:
        """A copy with one more request."""
        use = _Use(self.means.copy(), self.variances.copy(), self.most.copy())
        use.add(ahead)
        return use

    def exceeds(self, num_blocks: int, deviations: float) -> bool:
        """Whether in some interval mean and `deviations` standard deviations, at most all of them, are more."""
        return any(
            most > num_blocks and mean + deviations * sqrt(variance) > num_blocks
            for mean, variance, most in zip(self.means, self.variances, self.most, strict=True)
        )


@dataclass(frozen=True)
class DecodePool:
    """KV blocks of one decode instance and who is active on it. Blocks in total exclude vLLM's null block.

    `overflow_probability` is the risk that reserve_expected takes. What several newcomers are judged by is worked out
    once: the cached properties.
    """

    block_size_tokens: int
    num_total_blocks: int
    num_free_blocks: int
    active: tuple[ActiveDecode, ...]
    overflow_probability: float = 0.15

    def with_newcomer(self, newcomer: Newcomer) -> DecodePool:
        """The pool once `newcomer` holds the blocks of its prompt."""
        held = num_blocks(newcomer.num_prompt_tokens, self.block_size_tokens)
        joined = ActiveDecode(newcomer.num_prompt_tokens, 0, newcomer.length_range, held, newcomer.forecast)
        pool = replace(
            self,
            num_free_blocks=self.num_free_blocks - held + newcomer.num_cached_blocks,
            active=(*self.active, joined),
        )
        if "expected_use" in self.__dict__:  # worked out already: what is new is added to it
            pool.__dict__["expected_use"] = self.expected_use.with_one(
                _ahead(newcomer.forecast, newcomer.length_range, newcomer.num_prompt_tokens, 0, self.block_size_tokens)
            )
        return pool

    @cached_property
    def num_outstanding_low_blocks(self) -> int:
        """Blocks that active requests still have to take to reach the lower end of their ranges."""
        size = self.block_size_tokens
        return sum(
            max(0, num_blocks(q.num_prompt_tokens + q.length_range.low_tokens, size) - q.num_held_blocks)
            for q in self.active
        )

    @cached_property
    def first_release(self) -> tuple[int, int]:
        """(tokens until the first request reaches `high`, blocks in use then, less those that it gives back)."""
        size = self.block_size_tokens
        shortest = min(_tokens_left(q) for q in self.active)
        grown = [num_blocks(q.num_prompt_tokens + q.num_output_tokens + shortest, size) for q in self.active]
        released = min(blocks for q, blocks in zip(self.active, grown, strict=True) if _tokens_left(q) == shortest)
        return shortest, sum(grown) - released

    @cached_property
    def by_tokens_left(self) -> list[tuple[int, int]]:
        """(tokens left to `high`, tokens now) of the active requests, last completion first."""
        return sorted(((_tokens_left(q), q.num_prompt_tokens + q.num_output_tokens) for q in self.active), reverse=True)

    @cached_property
    def expected_use(self) -> _Use:
        """What the active requests need ahead, interval by interval."""
        use = _Use()
        for q in self.active:
            use.add(
                _ahead(q.forecast, q.length_range, q.num_prompt_tokens, q.num_output_tokens, self.block_size_tokens)
            )
        return use

    @cached_property
    def overflow_deviations(self) -> float:
        """Standard deviations above the mean that are passed with `overflow_probability`."""
        return NormalDist().inv_cdf(1.0 - self.overflow_probability)


AdmitPolicy = Callable[[Newcomer, DecodePool], bool]


def can_ever_fit(num_prompt_tokens: int, max_tokens: int, block_size_tokens: int, num_total_blocks: int) -> bool:
    """Whether an empty instance could serve the request to its end; if not, it is refused at the door.

    The prompt must also leave one block over, or the landing rule (`fits_now`) would keep it waiting for ever.
    """
    at_its_longest = num_blocks(num_prompt_tokens + max_tokens, block_size_tokens)
    to_land = num_blocks(num_prompt_tokens, block_size_tokens) + 1
    return max(at_its_longest, to_land) <= num_total_blocks


def fits_now(newcomer: Newcomer, pool: DecodePool) -> bool:
    """The landing rule of every policy: the prompt's KV, and one block to write into, must have somewhere to go."""
    return _new_blocks(newcomer, 0, pool) + 1 <= pool.num_free_blocks


def greedy(newcomer: Newcomer, pool: DecodePool) -> bool:
    """vLLM's own rule: admit whatever fits now."""
    return fits_now(newcomer, pool)


def reserve_static(newcomer: Newcomer, pool: DecodePool) -> bool:
    """Admit iff the newcomer fits at the lower end of its range. Source: TetriInfer 3.4."""
    if not fits_now(newcomer, pool):
        return False
    if not pool.active:
        return True
    return _new_blocks(newcomer, newcomer.length_range.low_tokens, pool) <= pool.num_free_blocks


def reserve_static_net(newcomer: Newcomer, pool: DecodePool) -> bool:
    """As reserve_static, less what active requests still have to grow to the lower end of theirs (ours)."""
    if not fits_now(newcomer, pool):
        return False
    if not pool.active:
        return True
    needed = _new_blocks(newcomer, newcomer.length_range.low_tokens, pool)
    return needed <= pool.num_free_blocks - pool.num_outstanding_low_blocks


def reserve_dynamic(newcomer: Newcomer, pool: DecodePool) -> bool:
    """Admit iff all fit once the request with fewest tokens left has ended and given back its blocks.

    Source: TetriInfer 3.4. Tokens left are counted to the upper end of a range. Of several that end together, the one
    that gives back fewest blocks counts, so that the order of the batch does not matter.
    """
    if not fits_now(newcomer, pool):
        return False
    if not pool.active:
        return True
    shortest, num_used_blocks = pool.first_release
    needed = _new_blocks(newcomer, min(shortest, newcomer.length_range.high_tokens), pool)
    return num_used_blocks + needed <= pool.num_total_blocks


def reserve_peak(newcomer: Newcomer, pool: DecodePool) -> bool:
    """Admit iff the batch fits at the peak before each of its completions, the newcomer's own included (ours).

    While all advance together and true lengths stay below `high`, a batch admitted so never overflows. For every
    distinct t among tokens left: sum over requests with at least t left of `blocks(prompt + out + t)` <= total.

    Runs for each request that is judged, so each peak costs O(block size), not O(batch): requests are added from the
    last completion to the first, and only how many have each remainder of `tokens % block size` is kept. With
    `tokens = a * size + v` and `t = b * size + w`, `blocks(tokens + t) = a + b + (v + w > 0) + (v + w > size)`.
    """
    if not fits_now(newcomer, pool):
        return False
    if not pool.active:
        return True
    size, total = pool.block_size_tokens, pool.num_total_blocks
    batch = [*pool.by_tokens_left, (newcomer.length_range.high_tokens, newcomer.num_prompt_tokens)]
    batch.sort(reverse=True)  # nearly sorted: linear
    num_by_remainder = [0] * size
    whole_blocks = 0
    for position, (left, tokens) in enumerate(batch):
        whole_blocks += tokens // size
        num_by_remainder[tokens % size] += 1
        if position + 1 < len(batch) and batch[position + 1][0] == left:
            continue  # ends together with the next: one peak for both
        grown, extra = divmod(left, size)
        num_alive = position + 1
        blocks = whole_blocks + num_alive * (grown + 1) + sum(num_by_remainder[size - extra + 1 :])
        if extra == 0:
            blocks -= num_by_remainder[0]
        if blocks > total:
            return False
    return True


def reserve_expected(newcomer: Newcomer, pool: DecodePool) -> bool:
    """Admit iff at no time ahead more blocks are needed than there are, but for a small probability (ours).

    The blocks that a batch needs in t tokens are a sum of independent terms: `blocks(prompt + out + t)` if the request
    still runs then, else nothing. Time is cut into intervals; in each a request counts with the blocks that it holds at
    the interval's end and the probability that it sees the beginning, so that no peak inside is missed. Admit iff in
    every interval mean + z * standard deviation, or the sum of all if that is less, is at most the pool; z from the
    pool's `overflow_probability`. Reserving `high` for everybody (reserve_peak) pays for all being long at once; a
    batch's requests are not. Source of the idea that the batch, not the request, is what must fit: LightLLM Past-Future
    (arXiv 2507.10150), which samples lengths from history.
    """
    if not fits_now(newcomer, pool):
        return False
    if not pool.active:
        return True
    ahead = _ahead(newcomer.forecast, newcomer.length_range, newcomer.num_prompt_tokens, 0, pool.block_size_tokens)
    return not pool.expected_use.with_one(ahead).exceeds(pool.num_total_blocks, pool.overflow_deviations)


def _interval_ends_blocks() -> Iterable[int]:
    """One block, two, three, then each half as far again."""
    end = 1
    while end < 1 << 22:
        yield end
        end += max(1, end // 2)


_INTERVAL_ENDS_BLOCKS = tuple(_interval_ends_blocks())  # from now, in blocks' worth of tokens


def _ahead(
    forecast: LengthForecast | None,
    length_range: LengthRange,
    num_prompt_tokens: int,
    num_output_tokens: int,
    block_size_tokens: int,
) -> list[tuple[float, int]]:
    """(P(still running at the beginning), blocks held at the end) of each interval in which the request may run.

    An interval ends whole blocks from now, so that a request then holds as many more, but for its very last token.
    """
    if forecast is None:
        forecast = LengthForecast.one_hot(length_range)
    longest = forecast.edges_tokens[-1] - 1
    begins = [num_output_tokens]
    for end in _INTERVAL_ENDS_BLOCKS:
        begin = num_output_tokens + end * block_size_tokens
        if begin >= longest:
            break
        begins.append(begin)
    over = forecast.survival(begins)
    if over[0] <= 1e-6:  # longer than the forecast thought possible
        later = forecast.given_more_than(num_output_tokens)
        return _ahead(later, length_range, num_prompt_tokens, num_output_tokens, block_size_tokens)
    held = num_blocks(num_prompt_tokens + num_output_tokens, block_size_tokens)
    most = num_blocks(num_prompt_tokens + longest, block_size_tokens)
    running = over[0]
    return [
        (share / running, held + end if held + end < most else most)
        for share, end in zip(over, _INTERVAL_ENDS_BLOCKS, strict=False)
        if share > 1e-9
    ]


ADMIT_ORDERS = ("arrival", "shortest_expected")
MAX_REFUSALS = 32  # a queue of hundreds is not judged to its end each time


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request in a decode instance's queue.

    `num_overtaken`: later arrivals that were admitted before it. `vetoed_s`: how long it has been first in line and
    refused by the policy. `expected_tokens`: mean of its forecast.
    """

    newcomer: Newcomer
    expected_tokens: float = 0.0
    num_overtaken: int = 0
    vetoed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueRules:
    """How a queue is judged. `num_seats`: requests that the engine can still run (`max_num_seqs` less the active).

    `may_overtake` False: behind the first that is refused nobody is admitted, as under vLLM's own rule.
    """

    num_seats: int
    order: str = "arrival"
    max_veto_s: float = 30.0
    max_overtaken: int = 64
    may_overtake: bool = True


def admit_queue(
    queue: Sequence[Candidate], pool: DecodePool, policy: AdmitPolicy, rules: QueueRules
) -> tuple[list[int], DecodePool]:
    """Which of `queue` (in order of arrival) are admitted now, as indices in the order of admission; and the pool then.

    - Each is judged after those admitted before it. On an empty instance the first is admitted: vLLM's own rule decides
      whether its prompt fits, so that one which only just fits never waits for ever.
    - A refused request may be overtaken, at most `max_overtaken` times: then it comes first and nobody passes it.
    - A veto is bounded: one that was first in line and refused for `max_veto_s` is admitted as soon as its prompt fits.
    - Without `may_overtake` nobody is admitted behind one that is refused.

    Raises:
        ConfigurationError: an unknown order.
    """
    if rules.order not in ADMIT_ORDERS:
        raise ConfigurationError(f"admit.order={rules.order!r} is unknown; known: {', '.join(ADMIT_ORDERS)}")
    overdue = [
        index
        for index, candidate in enumerate(queue)
        if candidate.num_overtaken >= rules.max_overtaken or candidate.vetoed_s > rules.max_veto_s
    ]
    first = frozenset(overdue)
    rest = [index for index in range(len(queue)) if index not in first]
    if rules.order == "shortest_expected":
        rest.sort(key=lambda index: queue[index].expected_tokens)
    admitted: list[int] = []
    num_refused = 0
    num_overtaken = {index: candidate.num_overtaken for index, candidate in enumerate(queue)}  # of those that wait
    for index in (*overdue, *rest):
        if len(admitted) >= rules.num_seats or num_refused >= MAX_REFUSALS:
            break
        candidate = queue[index]
        judge = fits_now if candidate.vetoed_s > rules.max_veto_s else policy
        if not pool.active or judge(candidate.newcomer, pool):
            passed = [earlier for earlier in num_overtaken if earlier < index]
            if any(num_overtaken[earlier] >= rules.max_overtaken for earlier in passed):
                continue
            for earlier in passed:
                num_overtaken[earlier] += 1
            del num_overtaken[index]
            admitted.append(index)
            pool = pool.with_newcomer(candidate.newcomer)
        elif index in first or not rules.may_overtake:
            break
        else:
            num_refused += 1
    return admitted, pool


def _tokens_left(active: ActiveDecode) -> int:
    # At least 1: a request that outgrew its range and awaits the next one still takes part in the next step.
    return max(1, active.length_range.high_tokens - active.num_output_tokens)


def _new_blocks(newcomer: Newcomer, num_output_tokens: int, pool: DecodePool) -> int:
    """Blocks to allocate for the newcomer once it has put out so many tokens; held cached blocks come for nothing."""
    return num_blocks(newcomer.num_prompt_tokens + num_output_tokens, pool.block_size_tokens) - (
        newcomer.num_cached_blocks
    )


ADMIT_POLICIES: dict[str, AdmitPolicy] = {
    "greedy": greedy,
    "reserve_static": reserve_static,
    "reserve_static_net": reserve_static_net,
    "reserve_dynamic": reserve_dynamic,
    "reserve_peak": reserve_peak,
    "reserve_expected": reserve_expected,
}
