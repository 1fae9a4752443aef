"""`backpressure`: what happens when the decode side is full, on a real cluster of one prefill and one decode instance.

One long reply holds nearly all of a decode instance's tiny KV pool; meanwhile many requests come. They wait on the
decode instance (vetoed), then on the prefill instance (KV pinned, up to its budget), then at the front door, and what
waits too long gets 429. Seen from outside: how long vetoes last, how many blocks are pinned, whether a lease ran out,
whether every answer is a whole one or an honest error, and whether the next requests are served as before.

The reply must outlast the waits, and these the leases, so the target is a real one, whose thousand tokens take half a
minute on one core. `--short` serves a tiny OPT made on the spot, with waits of less than a second; nothing here depends
on what a model says.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.table import Table

from benchmarks.engines import cores, set_shortest_lease
from benchmarks.record import Record, deliver, save_figure, say
from pipeline.target import make_target
from serving_plugin.bench.systems import executable, free_ports
from serving_plugin.control import checks
from serving_plugin.control.launcher import Device, InstancePlan, base_url, build_instance_command
from serving_plugin.core.config import AdmitSettings, InstanceSettings, TransferSettings
from serving_plugin.core.types import Role
from serving_plugin.processes import Child, ChildSpec, stop_all, wait_until_ready

__all__ = ["deliver", "draw", "run"]

READY_TIMEOUT_S = 300.0
POLL_S = 0.2
EXPIRED = "Releasing expired KV blocks"  # NIXL's log line when a lease runs out
RECOVERED = 2.0  # median time of a request on the empty cluster afterwards, over that of before: the machine drifts


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. Blocks of 32 tokens; the long reply comes to fill the decode pool by itself."""

    num_requests: int = 50
    prompt_tokens: int = 600
    output_tokens: int = 40
    long_prompt_tokens: int = 1000
    long_output_tokens: int = 1040
    num_prefill_blocks: int = 160
    num_decode_blocks: int = 66
    pinned_budget: float = 0.5
    max_veto_s: float = 2.0
    max_wait_s: float = 6.0
    num_after: int = 20


# The tiny target may write a thousand tokens in two seconds: waits end well before.
SHORT = Extent(num_requests=16, max_veto_s=0.2, max_wait_s=0.4, num_after=4)


@dataclass(slots=True, kw_only=True)
class BackpressureResult(Record):
    """Every answer, and the state of both instances over time (seconds since the flood began)."""

    model: str
    extent: dict[str, Any]
    answers: list[dict[str, Any]] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    queued: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    num_expired_leases: int = 0
    ledgers_after: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether everything was answered and every bound held."""
        return bool(self.answers) and all(row[3] for row in self.checks())

    def checks(self) -> list[tuple[str, str, str, bool]]:
        """(what, bound, measured, whether it held)."""
        extent = self.extent
        budget = extent["pinned_budget"] * extent["num_prefill_blocks"]
        allowed_blocks = max(budget, -(-extent["long_prompt_tokens"] // 32))  # one prompt alone is always taken
        pinned = max((sample["pinned_blocks"] for sample in self.samples), default=0)
        statuses = Counter(answer["status"] for answer in self.answers)
        allowed = extent["max_wait_s"] + 2.0  # a step and the watch's pause, on a busy machine
        refused = [answer for answer in self.answers if answer["status"] == 429]
        ledgers = list(self.ledgers_after.values())
        normal = _median_s(self.before) or 1.0
        recovered = (_median_s(self.after) or float("inf")) / normal
        waits_s = [_left_s(one) - one["arrived_s"] for one in self.queued.get("decode", ())]
        vetoes_s = [
            _left_s(one) - one["vetoed_since_s"]
            for one in self.queued.get("decode", ())
            if one["vetoed_since_s"] is not None
        ]
        return [
            ("longest wait in the decode queue, s", f"{allowed:g}", f"{max(waits_s, default=0.0):.1f}",
             bool(waits_s) and max(waits_s) <= allowed),
            (f"longest veto, s (of {len(vetoes_s)})", f"{allowed:g}", f"{max(vetoes_s, default=0.0):.1f}",
             bool(vetoes_s) and max(vetoes_s) <= allowed),
            (f"KV pinned on the prefill instance, blocks ({len(self.samples)} samples)", f"{allowed_blocks:g}",
             f"{pinned}", 0 < pinned <= allowed_blocks),
            ("leases that ran out", "0", f"{self.num_expired_leases}", self.num_expired_leases == 0),
            ("answers other than 200 and 429", "0", f"{len(self.answers) - statuses[200] - statuses[429]}",
             set(statuses) <= {200, 429}),
            ("429 without Retry-After", "0",
             f"{sum(not answer['retry_after'] for answer in refused)} of {len(refused)}",
             all(answer["retry_after"] for answer in refused)),
            ("429 at all (decode was full for long enough)", "at least 1", f"{len(refused)}", bool(refused)),
            ("answers of a wrong length", "0", f"{sum(answer['is_wrong'] for answer in self.answers)}",
             not any(answer["is_wrong"] for answer in self.answers)),
            ("requests served afterwards", f"{extent['num_after']}",
             f"{sum(answer['status'] == 200 for answer in self.after)}",
             bool(self.after) and all(answer["status"] == 200 for answer in self.after)),
            ("their median time against before", f"{RECOVERED:g}x", f"{recovered:.2f}x", recovered <= RECOVERED),
            ("blocks neither free nor cached afterwards", "0",
             f"{sum(ledger['total'] - ledger['free'] - ledger['cached'] for ledger in ledgers)}",
             bool(ledgers) and all(one["balanced"] and one["total"] == one["free"] + one["cached"] for one in ledgers)),
        ]  # fmt: skip

    def tables(self) -> Iterator[Table]:
        """Bounds, and how many answers of each kind."""
        what = f"{self.extent['num_requests']} requests beside one long reply"
        table = Table(title=f"A full decode instance: {what}, {self.model}")
        for column in ("what", "bound", "measured", "held"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for what, bound, measured, is_held in self.checks():
            table.add_row(what, bound, measured, "yes" if is_held else "NO")
        yield table
        table = Table(title="Answers")
        for column in ("status", "requests", "first after, s", "last after, s"):
            table.add_column(column, justify="right")
        for status in sorted({answer["status"] for answer in self.answers}):
            ends = [answer["end_s"] for answer in self.answers if answer["status"] == status]
            table.add_row(str(status), str(len(ends)), f"{min(ends):.1f}", f"{max(ends):.1f}")
        yield table


def run(model: Path, is_short: bool) -> BackpressureResult:
    """Start the cluster, fill it, watch it, see it recover."""
    extent = SHORT if is_short else Extent()
    if not is_short:
        checks.check_model(str(model.absolute()))
    with tempfile.TemporaryDirectory() as folder:
        target = make_target("tiny-opt", Path(folder) / "tiny-target") if is_short else model
        result = BackpressureResult(model=target.name, extent=asdict(extent))
        asyncio.run(_measure(extent, result, target, Path(folder)))
    return result


async def _measure(extent: Extent, result: BackpressureResult, target: Path, folder: Path) -> None:
    gateway_port, *ports = free_ports(3)
    gateway = base_url("127.0.0.1", gateway_port)
    urls = dict(zip(("prefill", "decode"), (base_url("127.0.0.1", port) for port in ports), strict=True))
    specs = [
        ChildSpec("gateway", (executable("tetri"), "gateway", "--port", str(gateway_port)), folder / "gateway.log", {})
    ]
    available = cores()
    for number, (role, url) in enumerate(urls.items()):
        core = available[number % len(available)]
        num_blocks = extent.num_prefill_blocks if role == "prefill" else extent.num_decode_blocks
        plan = InstancePlan(
            model=str(target),
            settings=_settings(extent, Role(role), url, gateway),
            device=Device.CPU,
            host="127.0.0.1",
            port=ports[number],
            cores=(core,),
            is_local_model=True,
            vllm_flags=("--num-gpu-blocks-override", str(num_blocks + 1)),
        )
        environment, argv = build_instance_command(plan)
        set_shortest_lease(argv)  # the longest waits outlast it: it must be renewed
        command = (executable("vllm"), *argv[1:])
        specs.append(ChildSpec(role, command, folder / f"{role}.log", environment, (core,)))
    children: list[Child] = []
    try:
        children += [Child(spec) for spec in specs]
        addresses = (gateway, *urls.values())
        wait_until_ready(
            {f"{url}/health": child for url, child in zip(addresses, children, strict=True)}, READY_TIMEOUT_S
        )
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            await _until_served(session, gateway, str(target))
            await _flood(extent, result, session, gateway, urls, str(target))
        log = (folder / "prefill.log").read_text(errors="replace")
        result.num_expired_leases = log.count(EXPIRED)
    finally:
        stop_all(children)


def _settings(extent: Extent, role: Role, url: str, gateway: str) -> InstanceSettings:
    return InstanceSettings(
        role=role,
        instance_id=role.value,
        url=url,
        gateways=(gateway,),
        admit=AdmitSettings("reserve_expected", max_veto_s=extent.max_veto_s, max_wait_s=extent.max_wait_s),
        transfer=TransferSettings("direct", extent.pinned_budget),
    )


async def _until_served(session: aiohttp.ClientSession, gateway: str, model: str) -> None:
    deadline_s = time.monotonic() + 60.0
    while True:
        answer = await _ask(session, gateway, model, (10, 4), time.monotonic())
        if answer["status"] == 200:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the cluster answers {answer['status']} after a minute")
        await asyncio.sleep(0.5)


async def _flood(
    extent: Extent,
    result: BackpressureResult,
    session: aiohttp.ClientSession,
    gateway: str,
    urls: dict[str, str],
    model: str,
) -> None:
    usual = (extent.prompt_tokens, extent.output_tokens)

    async def ask(num_tokens: tuple[int, int], start_s: float) -> dict[str, Any]:
        return await _ask(session, gateway, model, num_tokens, start_s)

    say("a few requests on an empty cluster")
    for _ in range(extent.num_after):
        result.before.append(await ask(usual, time.monotonic()))
    say("one long reply, then everybody")
    start_s = time.monotonic()
    long_reply = asyncio.create_task(ask((extent.long_prompt_tokens, extent.long_output_tokens), start_s))
    await asyncio.sleep(1.0)
    watching = asyncio.create_task(_watch(result, session, urls, start_s))
    waiting = [asyncio.create_task(ask(usual, start_s)) for _ in range(extent.num_requests)]
    result.answers += await asyncio.gather(*waiting)
    long_answer = await long_reply
    say(f"the long reply: {long_answer['status']} after {long_answer['end_s']:.1f} s")
    result.answers.append(long_answer)
    for _ in range(extent.num_after):
        result.after.append(await ask(usual, time.monotonic()))
    watching.cancel()
    (ended,) = await asyncio.gather(watching, return_exceptions=True)
    if isinstance(ended, Exception):  # what it did not see cannot be said to have held
        raise ended
    for role, url in urls.items():
        deadline_s = time.monotonic() + 40.0
        while True:
            async with session.get(f"{url}/tetri/ledger") as response:
                ledger = await response.json()
            if not ledger["in_flight_requests"] or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.5)
        result.ledgers_after[role] = ledger
        async with session.get(f"{url}/tetri/scheduler") as response:
            result.queued[role] = (await response.json())["requests"]


async def _watch(
    result: BackpressureResult, session: aiohttp.ClientSession, urls: dict[str, str], start_s: float
) -> None:
    while True:
        loads = {}
        for role, url in urls.items():
            async with session.get(f"{url}/tetri/instance") as response:
                loads[role] = (await response.json())["load"]
        result.samples.append(
            {
                "at_s": round(time.monotonic() - start_s, 2),
                "pinned_blocks": loads["prefill"]["num_pinned_blocks"],
                "prefill_waiting": loads["prefill"]["num_waiting"],
                "decode_waiting": loads["decode"]["num_waiting"],
                "decode_active": loads["decode"]["num_running"] + loads["decode"]["num_loading"],
                "decode_free_blocks": loads["decode"]["num_free_blocks"],
            }
        )
        await asyncio.sleep(POLL_S)


async def _ask(
    session: aiohttp.ClientSession, gateway: str, model: str, num_tokens: tuple[int, int], start_s: float
) -> dict[str, Any]:
    """One request of so many prompt and output tokens; `end_s` counts from `start_s`, `seconds` from its sending."""
    prompt_tokens, output_tokens = num_tokens
    body = {"model": model, "prompt": [7] * prompt_tokens, "max_tokens": output_tokens, "ignore_eos": True}
    sent_s = time.monotonic()
    async with session.post(f"{gateway}/v1/completions", json={**body, "temperature": 0}) as response:
        answer = await response.json()
        end_s = time.monotonic()
        usage = answer.get("usage") or {}
        return {
            "status": response.status,
            "seconds": round(end_s - sent_s, 3),
            "end_s": round(end_s - start_s, 3),
            "retry_after": response.headers.get("Retry-After"),
            "is_wrong": response.status == 200 and usage.get("completion_tokens") != output_tokens,
            "error": (answer.get("error") or {}).get("message"),
        }


def _left_s(one: dict[str, Any]) -> float:
    """When a request left the queue: admitted, or withdrawn."""
    return float(one["admitted_s"] or one["finished_s"] or one["arrived_s"])


def _median_s(answers: list[dict[str, Any]]) -> float | None:
    seconds = sorted(answer["seconds"] for answer in answers if answer["status"] == 200)
    return seconds[len(seconds) // 2] if seconds else None


def draw(result: BackpressureResult, path: Path) -> None:
    """Queues and pinned blocks over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 5.5), sharex=True, layout="constrained")
    at_s = [sample["at_s"] for sample in result.samples]
    for key, label in (
        ("decode_waiting", "decode queue"),
        ("prefill_waiting", "prefill queue"),
        ("decode_active", "decoding"),
    ):
        upper.plot(at_s, [sample[key] for sample in result.samples], label=label)
    upper.set_ylabel("requests")
    lower.plot(at_s, [sample["pinned_blocks"] for sample in result.samples], label="pinned on the prefill instance")
    lower.plot(at_s, [sample["decode_free_blocks"] for sample in result.samples], label="free on the decode instance")
    budget = result.extent["pinned_budget"] * result.extent["num_prefill_blocks"]
    lower.axhline(budget, color="black", linestyle="--", linewidth=1, label="pinned budget")
    lower.set_ylabel("KV blocks")
    lower.set_xlabel("seconds since the long reply was asked for")
    for axes in (upper, lower):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle("A full decode instance")
    save_figure(figure, path)
    pyplot.close(figure)
