"""What the experiments run inside offline engines: prompts, prefill that holds its KV cache, decoding of it elsewhere.

Functions here are called through `EngineProcess.call(function, ...)`: their first argument is the engine. A prefill
engine hands each finished prompt's transfer parameters to a decode engine through a folder (`Mailbox`), as a gateway
would with the answers of prefill legs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving_plugin.bench.metrics import paired_ratio as paired_ratio

HOLD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request: token ids of its prompt, when it comes (seconds after the start), how long its reply gets.

    `max_tokens` is what the client asked for and what policies see; `num_output_tokens` where the reply really ends.
    `forecast`: the "tetri" metadata of the request (forecast, length_range, ...), as a dispatcher sends it.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    forecast: dict[str, Any] = field(default_factory=dict)


class Mailbox:
    """A folder that carries transfer parameters from a prefill engine's process to a decode engine's."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def put(self, id: str, params: dict[str, Any]) -> None:
        """Leave the parameters of request `id`."""
        half = self._folder / f".{id}"
        half.write_text(json.dumps(params))
        half.replace(self._folder / f"{id}.json")

    def take(self) -> dict[str, dict[str, Any]]:
        """Everything that has come since the last time, by request id, oldest first."""
        found = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        taken = {}
        for path in found:
            taken[path.stem] = json.loads(path.read_text())
            path.unlink()
        return taken


def prefill_and_hold(engine: Any, jobs: Sequence[Job], mailbox: str, timeout_s: float = HOLD_TIMEOUT_S) -> list[Any]:
    """Prefill `jobs` as they arrive, hand over each at once, and hold the KV cache until all of it was pulled.

    Returns `Progress` per job, in their order. Raises `TimeoutError` after `timeout_s`.
    """
    start_s, box = time.perf_counter(), Mailbox(mailbox)
    coming = sorted(jobs, key=lambda job: job.arrival_s)
    handed: set[str] = set()
    while coming or engine.scheduler.has_requests():
        now_s = time.perf_counter() - start_s
        if now_s > timeout_s:
            raise TimeoutError(f"KV of {len(engine.scheduler.requests)} requests still held after {timeout_s:g} s")
        while coming and coming[0].arrival_s <= now_s:
            job = coming.pop(0)
            params = {"do_remote_decode": True, "do_remote_prefill": False, "tetri": {"request_id": job.id}}
            engine.add(job.id, job.prompt_token_ids, 1, kv_transfer_params=params)
        if not engine.scheduler.has_requests():
            time.sleep(min(0.01, max(0.0, coming[0].arrival_s - now_s)))
            continue
        engine.step()
        for job in jobs:
            progress = engine.requests.get(job.id)
            if job.id not in handed and progress is not None and progress.kv_transfer_params is not None:
                handed.add(job.id)
                box.put(job.id, progress.kv_transfer_params)
    return [engine.requests[job.id] for job in jobs]


def pulled(job: Job, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with which a decode engine pulls what `prefill_and_hold` holds."""
    return {**params, "tetri": {**(params.get("tetri") or {}), "decode_id": "d", **job.forecast}}


def decode(
    engine: Any, jobs: Sequence[Job], mailbox: str | None = None, timeout_s: float = HOLD_TIMEOUT_S
) -> tuple[list[Any], list[Any]]:
    """Run `jobs` to their ends: pulled from a prefill engine through `mailbox`, or whole on this engine without one.

    Returns (`Progress` per job, in their order, and the engine's steps), and forgets them here.
    """
    start_s, box = time.perf_counter(), Mailbox(mailbox) if mailbox is not None else None
    by_id = {job.id: job for job in jobs}
    coming = sorted(jobs, key=lambda job: job.arrival_s) if box is None else []
    num_left = len(jobs)
    while num_left or engine.scheduler.has_unfinished_requests():
        now_s = time.perf_counter() - start_s
        if now_s > timeout_s:
            raise TimeoutError(f"{num_left} to come and {len(engine.scheduler.requests)} running after {timeout_s:g} s")
        while coming and coming[0].arrival_s <= now_s:
            job = coming.pop(0)
            params = {"tetri": {"request_id": job.id, **job.forecast}}
            engine.add(job.id, job.prompt_token_ids, job.max_tokens, job.num_output_tokens, params)
            num_left -= 1
        for id, params in (box.take() if box is not None else {}).items():
            job = by_id[id]
            engine.add(id, job.prompt_token_ids, job.max_tokens, job.num_output_tokens, pulled(job, params))
            num_left -= 1
        if not engine.step() and not engine.scheduler.has_requests():
            time.sleep(0.001)
    result = [engine.requests[job.id] for job in jobs], engine.steps
    while engine.scheduler.has_requests():  # P is told that its KV was pulled in the steps after the last token
        engine.step()
    engine.forget()
    return result


def cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
