"""Admit: whether a decode instance takes a waiting request into its batch now. Pure arithmetic; standard library only.

Definitions: docs/definitions.md, "Blocks on a decode instance". Source: TetriInfer 3.4 for greedy, reserve_static and
reserve_dynamic; reserve_static_net and reserve_peak are ours. Lengths are ranges; the true length is never seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import num_blocks


@dataclass(frozen=True, slots=True)
class ActiveDecode:
    """A request that runs, loads or waits loaded; `length_range` is in force now, `num_held_blocks` are its own."""

    num_prompt_tokens: int
    num_output_tokens: int
    length_range: LengthRange
    num_held_blocks: int


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that waits for admission, nothing put out yet.

    One that comes back after a preemption counts its output as prompt and its range from there.
    `num_cached_blocks`: blocks of its prompt that the local prefix cache has *and* a live request holds. A cached block
    nobody holds is already counted in the pool's free blocks.
    """

    num_prompt_tokens: int
    length_range: LengthRange
    num_cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class DecodePool:
    """KV blocks of one decode instance and who is active on it. Blocks in total exclude vLLM's null block."""

    block_size_tokens: int
    num_total_blocks: int
    num_free_blocks: int
    active: tuple[ActiveDecode, ...]


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
    size = pool.block_size_tokens
    outstanding = sum(
        max(0, num_blocks(q.num_prompt_tokens + q.length_range.low_tokens, size) - q.num_held_blocks)
        for q in pool.active
    )
    return _new_blocks(newcomer, newcomer.length_range.low_tokens, pool) <= pool.num_free_blocks - outstanding


def reserve_dynamic(newcomer: Newcomer, pool: DecodePool) -> bool:
    """Admit iff all fit once the request with fewest tokens left has ended and given back its blocks.

    Source: TetriInfer 3.4. Tokens left are counted to the upper end of a range. Of several that end together, the one
    that gives back fewest blocks counts, so that the order of the batch does not matter.
    """
    if not fits_now(newcomer, pool):
        return False
    if not pool.active:
        return True
    size = pool.block_size_tokens
    shortest = min(_tokens_left(q) for q in pool.active)
    grown = [num_blocks(q.num_prompt_tokens + q.num_output_tokens + shortest, size) for q in pool.active]
    released = min(blocks for q, blocks in zip(pool.active, grown, strict=True) if _tokens_left(q) == shortest)
    needed = _new_blocks(newcomer, min(shortest, newcomer.length_range.high_tokens), pool)
    return sum(grown) - released + needed <= pool.num_total_blocks


def reserve_peak(newcomer: Newcomer, pool: DecodePool) -> bool:
    """Admit iff the batch fits at the peak before each of its completions, the newcomer's own included (ours).

    While all advance together and true lengths stay below `high`, a batch admitted so never overflows. For every
    distinct t among tokens left: sum over requests with at least t left of `blocks(prompt + out + t)` <= total.

    Runs for each waiting request each step, so each peak costs O(block size), not O(batch): requests are added from the
    last completion to the first, and only how many have each remainder of `tokens % block size` is kept. With
    `tokens = a * size + v` and `t = b * size + w`, `blocks(tokens + t) = a + b + (v + w > 0) + (v + w > size)`.
    """
    if not fits_now(newcomer, pool):
        return False
    if not pool.active:
        return True
    size, total = pool.block_size_tokens, pool.num_total_blocks
    batch = [(_tokens_left(q), q.num_prompt_tokens + q.num_output_tokens) for q in pool.active]
    batch.append((newcomer.length_range.high_tokens, newcomer.num_prompt_tokens))
    batch.sort(reverse=True)
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
}
