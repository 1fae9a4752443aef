"""What the experiments run inside offline engines: prompts, prefill that holds its KV cache, decoding of it elsewhere.

Functions here are called through `EngineProcess.call(function, ...)`: their first argument is the engine. A prefill
engine hands each finished prompt's transfer parameters to a decode engine through a folder (`Mailbox`), as a gateway
would with the answers of prefill legs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving_plugin.bench.metrics import paired_ratio

HOLD_TIMEOUT_S = 600.0
SHORTEST_LEASE_S = 6  # below it vLLM's heartbeats would go out in every step; its default is 30 s


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
    coming = sorted(jobs, key=lambda job: job.arrival_s)
    held: dict[str, dict[str, Any]] = {}  # transfer parameters that have come, by request
    while coming or engine.scheduler.has_unfinished_requests():
        now_s = time.perf_counter() - start_s
        if now_s > timeout_s:
            raise TimeoutError(f"{len(coming)} to come and {len(engine.scheduler.requests)} running, {timeout_s:g} s")
        if box is not None and coming:
            held |= box.take()
        for job in [job for job in coming if job.arrival_s <= now_s and (box is None or job.id in held)]:
            own = {"tetri": {"request_id": job.id, **job.forecast}}
            params = own if box is None else pulled(job, held.pop(job.id))
            engine.add(job.id, job.prompt_token_ids, job.max_tokens, job.num_output_tokens, params)
            coming.remove(job)
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


def set_shortest_lease(argv: list[str]) -> None:
    """In an instance's command line: KV that nobody pulls or asks to keep is held for `SHORTEST_LEASE_S` only."""
    place = argv.index("--kv-transfer-config") + 1
    config = json.loads(argv[place])
    config["kv_connector_extra_config"]["kv_lease_duration"] = SHORTEST_LEASE_S
    argv[place] = json.dumps(config)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of round `number`: every other one the other way round."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def rounded(times_ms: Sequence[float]) -> list[float]:
    """To a microsecond, which is more than is known."""
    return [round(ms, 3) for ms in times_ms]


def ratio_text(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Mean over the rounds of the ratio, with one-sided 95 % bounds where there are rounds enough."""
    return _ratio_text(ours, theirs, lambda ratio: f"{ratio:.2f}", "x")


def change_text(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The same as a change in percent."""
    return _ratio_text(ours, theirs, lambda ratio: f"{100 * (ratio - 1):+.1f}", " %")


def _ratio_text(ours: Sequence[float], theirs: Sequence[float], show: Callable[[float], str], unit: str) -> str:
    found = paired_ratio(ours, theirs)
    if found is None:
        return "-"
    bounds = (
        "" if found.lower_95 is None or found.upper_95 is None else f" [{show(found.lower_95)}, {show(found.upper_95)}]"
    )
    return show(found.mean) + unit + bounds
