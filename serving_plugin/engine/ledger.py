"""The block ledger: every KV block is exactly one of free, cached, running, loading or pinned (definitions: "Ledger").

Runs in EngineCore between steps, over the scheduler's own containers. Counts per KV cache group are summed; a block
shared through the prefix cache counts once, for its first owner in the order running, loading, pinned.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus


def take_ledger(scheduler: Any) -> dict[str, Any]:
    """Count the blocks of `scheduler` by state and name what does not add up (`problems`, empty when balanced)."""
    manager = scheduler.kv_cache_manager
    owners: dict[int, str] = {}
    counts = {"running": 0, "loading": 0, "pinned": 0}
    for state, request in sorted(_holders(scheduler), key=lambda pair: tuple(counts).index(pair[0])):
        for group in manager.get_block_ids(request.request_id):
            for block_id in group:
                if block_id != manager.block_pool.null_block.block_id and block_id not in owners:
                    owners[block_id] = state
                    counts[state] += 1
    free, cached, problems = 0, 0, []
    for block in manager.block_pool.blocks:
        if block.is_null:
            continue
        if block.ref_cnt == 0:
            if block.block_id in owners:
                problems.append(f"block {block.block_id} is {owners[block.block_id]} and free")
            cached += block.block_hash is not None
            free += block.block_hash is None
        elif block.block_id not in owners:
            problems.append(f"block {block.block_id} is referenced {block.ref_cnt} times and held by no request")
    total = len(manager.block_pool.blocks) - 1
    if free + cached + sum(counts.values()) != total:
        problems.append(f"states sum to {free + cached + sum(counts.values())} blocks of {total}")
    if manager.block_pool.get_num_free_blocks() != free + cached:
        problems.append(f"pool says {manager.block_pool.get_num_free_blocks()} free, ledger {free + cached}")
    return {
        "total": total,
        "free": free,
        "cached": cached,
        **counts,
        "in_flight_requests": len(scheduler.requests),
        "problems": problems[:20],
        "balanced": not problems,
    }


def _holders(scheduler: Any) -> list[tuple[str, Any]]:
    """(state, request) for every request that the scheduler still knows."""
    found = []
    for request in scheduler.requests.values():
        if RequestStatus.is_finished(request.status):
            found.append(("pinned", request))
        elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            found.append(("loading", request))
        else:
            found.append(("running", request))
    return found
