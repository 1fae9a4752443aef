"""`interference`: prefill and decode requests beside each other, on one engine and apart (TetriInfer figures 3-5).

Three systems, all real engines, measured in turn within each round:
  coupled             vLLM's own scheduler on one core, prompts whole in one step (the paper's baseline)
  coupled, chunk 128  vLLM's own scheduler on one core, at most 128 tokens in a step: the modern baseline
  apart               our prefill instance (sjf, chunk 128) on that core, our decode instance on another, the KV cache
                      pulled over NIXL; so two cores against one: this shows interference, not cost

A ratio is a latency over that of the same system undisturbed, in the same round:
  figure 3      prompts queued at one moment; from then to the first token of the one queued last, and of the first
  figure 4a, b  gaps between a running decode's tokens, from a newcomer's arrival to its first token, over the median
                gap before. Apart, that includes the newcomer's transfer and its first decode step
  figure 4c, d  the newcomer's prefill, from `add` to its first token (apart: on the prefill instance; the first token
                on the decode instance is a second figure), over the same beside no decode
  mixed         a few decodes beside prompts that arrive at random: how even are the decodes' tokens?
  figure 5      decode batches of light and of half heavy requests, on one decode instance and spread over two

A batch here is 32 requests, in the paper 128. Heavy contexts of figure 5 are prefilled once; while a batch is measured,
requests that are no part of it keep their KV cache and are left out of the scheduler's running queue.

`--short` shows that it works and measures nothing worth quoting.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.engines import Job, Mailbox, cores, in_turn, prefill_and_hold, pulled, rounded
from benchmarks.interference_report import (
    ALL_LIGHT,
    BALANCED,
    CHUNK_TOKENS,
    CHUNKED,
    COUPLED,
    HALF_HEAVY,
    HEAVY_CONTEXT_TOKENS,
    HEAVY_TOKENS,
    IMBALANCED,
    LIGHT_CONTEXT_TOKENS,
    LIGHT_TOKENS,
    QUEUES,
    SYSTEMS,
    InterferenceResult,
    Row,
    draw,
)
from benchmarks.record import deliver, say
from serving_plugin.bench.workloads import model_context_tokens
from serving_plugin.core.config import AdmitSettings, ChunkSettings, InstanceSettings, OrderSettings, TransferSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import Role
from serving_plugin.engine.offline_process import EngineProcess, EngineSpec

CONTEXT_TOKENS = 2048
HELD_CONTEXT_TOKENS = 900  # figure 5's heavy decodes, which grow past 1,024 while the rounds go on
NUM_NEWCOMER_TOKENS = 3
MAX_BATCH_STEPS = 60
RUN_TIMEOUT_S = 300.0

__all__ = ["deliver", "draw", "run"]

T = TypeVar("T")

_serial = itertools.count()  # ids never repeat, or a scheduler would take a prompt for one of an earlier round


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. Decodes run for `before_s` before a newcomer comes, a batch of figure 5 for `batch_s`."""

    num_rounds: int = 5
    num_decodes: tuple[int, ...] = (0, 1, 3, 7, 15, 31)
    num_light_newcomers: int = 3
    before_s: float = 0.3
    mixed_s: float = 10.0
    mixed_rate_per_s: float = 2.0
    mixed_heavy_share: float = 0.25
    mixed_num_decodes: int = 4
    batch_size: int = 32
    batch_s: float = 2.0


SHORT = Extent(
    num_rounds=1,
    num_decodes=(0, 1, 3),
    num_light_newcomers=1,
    mixed_s=3.0,
    mixed_num_decodes=2,
    batch_size=4,
    batch_s=0.5,
)


# Inside an engine's process


@dataclass(frozen=True, slots=True)
class Seen:
    """What `watch` saw, in monotonic seconds: a running decode's tokens, and each job's arrival and first token."""

    start_s: float
    decode_times_s: tuple[float, ...]
    added_s: tuple[float, ...]
    first_token_s: tuple[float, ...]


def prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    """Token ids below 250, which every vocabulary has; what they say does not matter to a step's time."""
    return tuple(random.Random(seed).choices(range(10, 250), k=num_tokens))


def queue_at_once(engine: Any, lengths: Sequence[int]) -> list[float]:
    """Prompts of `lengths` tokens queued in that order; milliseconds from then to the first token of each."""
    engine.forget()
    queued = [engine.add(f"prompt-{next(_serial)}", prompt(n, i), 1) for i, n in enumerate(lengths)]
    start_s = time.perf_counter()
    engine.run(RUN_TIMEOUT_S)
    return [1000 * (progress.token_times_s[0] - start_s) for progress in queued]


def start_decodes(engine: Any, number: int, context_tokens: int) -> None:
    """Have `number` requests decode in every step from here on, until `stop`."""
    engine.forget()
    for i in range(number):
        engine.add(f"decode-{i}", prompt(context_tokens, i), CONTEXT_TOKENS - context_tokens)
    _step_until(engine, lambda: all(len(progress.token_times_s) > 2 for progress in engine.requests.values()))


def watch(engine: Any, jobs: Sequence[Job], mailbox: str | None = None) -> Seen:
    """Step until all `jobs` have ended, beside what runs already: pulled through `mailbox`, or whole here without."""
    start_s, by_id = time.perf_counter(), {job.id: job for job in jobs}
    box = Mailbox(mailbox) if mailbox is not None else None
    coming = sorted(jobs, key=lambda job: job.arrival_s) if box is None else []

    def is_done() -> bool:
        while coming and coming[0].arrival_s <= time.perf_counter() - start_s:
            job = coming.pop(0)
            engine.add(job.id, job.prompt_token_ids, job.max_tokens)
        for id, params in (box.take() if box is not None else {}).items():
            job = by_id[id]
            engine.add(id, job.prompt_token_ids, job.max_tokens, kv_transfer_params=pulled(job, params))
        return all(id in engine.requests and engine.requests[id].finished_s is not None for id in by_id)

    _step_until(engine, is_done)
    found = [engine.requests[job.id] for job in jobs]
    decode = engine.requests.get("decode-0")
    return Seen(
        start_s,
        () if decode is None else tuple(decode.token_times_s),
        tuple(progress.added_s for progress in found),
        tuple(progress.token_times_s[0] for progress in found),
    )


def prefill_for_other(engine: Any, jobs: Sequence[Job], mailbox: str) -> tuple[list[float], list[float]]:
    """`prefill_and_hold`; when each job was added and when it had its token, in plain numbers: whoever unpickles more
    of an engine imports vLLM."""
    engine.forget()
    held = prefill_and_hold(engine, jobs, mailbox, RUN_TIMEOUT_S)
    return [progress.added_s for progress in held], [progress.token_times_s[0] for progress in held]


def stop(engine: Any) -> None:
    """Abort all that runs; the prefill instance learns in the steps after it that its KV cache was pulled."""
    engine.core.abort_requests(list(engine.scheduler.requests))
    _step_until(engine, lambda: not engine.scheduler.has_requests())
    engine.forget()


def hold_heavy(engine: Any, number: int, context_tokens: int) -> None:
    """Prefill heavy requests for `lay_out`, and leave them out of every step until then."""
    engine.forget()
    heavy = [
        engine.add(f"heavy-{i}", prompt(context_tokens, i), CONTEXT_TOKENS - context_tokens) for i in range(number)
    ]
    _step_until(engine, lambda: all(progress.token_times_s for progress in heavy))
    engine.held, engine.scheduler.running = list(engine.scheduler.running), []


def lay_out(engine: Any, num_light: int, num_heavy: int, serial: int) -> None:
    """A decode batch of new light requests and of heavy ones that are held. `serial` sets layouts apart."""
    light = [
        engine.add(f"light-{serial}-{i}", prompt(LIGHT_CONTEXT_TOKENS, i), CONTEXT_TOKENS - LIGHT_CONTEXT_TOKENS)
        for i in range(num_light)
    ]
    _step_until(engine, lambda: all(progress.token_times_s for progress in light))
    engine.scheduler.running = [*engine.scheduler.running, *engine.held[:num_heavy]]
    for _ in range(3):
        engine.step()


def run_batch(engine: Any, seconds: float) -> Row:
    """Decode the batch for `seconds`, at most MAX_BATCH_STEPS (heavy requests must not reach the end of their context),
    then drop its light requests and hold the heavy ones again."""
    engine.steps = []
    until_s = time.perf_counter() + seconds
    _step_until(engine, lambda: time.perf_counter() >= until_s or len(engine.steps) >= MAX_BATCH_STEPS)
    manager, running = engine.scheduler.kv_cache_manager, engine.scheduler.running
    figures = {
        "step_ms": rounded([1000 * step.duration_s for step in engine.steps]),
        "num_tokens": sum(step.num_decode_tokens for step in engine.steps),
        "num_kv_blocks": sum(len(manager.get_block_ids(request.request_id)[0]) for request in running),
        "num_total_blocks": manager.block_pool.num_gpu_blocks - 1,
    }
    engine.scheduler.running = [request for request in running if request not in engine.held]
    engine.core.abort_requests([request.request_id for request in engine.scheduler.running])
    return figures


def reconfigure(engine: Any, settings: InstanceSettings) -> None:
    """Another role."""
    engine.configure(settings)


def _step_until(engine: Any, is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while not is_done():
        if not engine.step() and not engine.scheduler.has_requests():
            time.sleep(0.001)
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(engine.scheduler.requests)} requests not done after {RUN_TIMEOUT_S:g} s")


# Outside


@dataclass(frozen=True, slots=True)
class Lab:
    """The engines, all up; idle ones wait on their pipes and take no CPU."""

    coupled: dict[str, EngineProcess]
    prefill: EngineProcess
    decode: EngineProcess
    mailbox: str

    def prefiller(self, system: str) -> EngineProcess:
        """Where prompts are prefilled."""
        return self.coupled.get(system, self.prefill)

    def decoder(self, system: str) -> EngineProcess:
        """Where tokens come from."""
        return self.coupled.get(system, self.decode)

    def watch(self, system: str, jobs: Sequence[Job]) -> tuple[Seen, list[float], list[float]]:
        """`jobs` beside the decodes that run; with when each was added to be prefilled and when it was (seconds)."""
        if system in self.coupled:
            seen = self.coupled[system].call(watch, jobs)
            return seen, list(seen.added_s), list(seen.first_token_s)
        self.decode.start_call(watch, jobs, self.mailbox)
        self.prefill.start_call(prefill_for_other, jobs, self.mailbox)
        seen = self.decode.result(2 * RUN_TIMEOUT_S)
        return seen, *self.prefill.result(2 * RUN_TIMEOUT_S)


def newcomers(lengths: Sequence[int], arrivals_s: Sequence[float]) -> list[Job]:
    """Jobs of a few output tokens."""
    return [
        Job(f"newcomer-{next(_serial)}", prompt(length, i), NUM_NEWCOMER_TOKENS, NUM_NEWCOMER_TOKENS, arrival_s)
        for i, (length, arrival_s) in enumerate(zip(lengths, arrivals_s, strict=True))
    ]


def arrivals(extent: Extent, seed: int) -> list[Job]:
    """The mixed run's newcomers: Poisson arrivals over `mixed_s`, light or heavy by chance, at least one heavy."""
    rng = random.Random(seed)
    times_s = itertools.accumulate(rng.expovariate(extent.mixed_rate_per_s) for _ in itertools.count())
    within_s = list(itertools.takewhile(lambda time_s: time_s < extent.mixed_s, times_s)) or [0.0]
    is_heavy = [rng.random() < extent.mixed_heavy_share for _ in within_s]
    is_heavy[0] |= not any(is_heavy)
    return newcomers([HEAVY_TOKENS if heavy else LIGHT_TOKENS for heavy in is_heavy], within_s)


def gaps_ms(times_s: Sequence[float], from_s: float, to_s: float) -> list[float]:
    """Gaps between a request's tokens that end after `from_s` and not after `to_s`."""
    return [1000 * (end - begin) for begin, end in itertools.pairwise(times_s) if from_s < end <= to_s]


# Measuring


def _settings(role: Role, name: str) -> InstanceSettings:
    chunk = ChunkSettings("fixed", CHUNK_TOKENS if role is Role.PREFILL else 0)
    return InstanceSettings(
        role,
        name,
        "http://offline",
        order=OrderSettings("sjf", 64),
        chunk=chunk,
        admit=AdmitSettings("greedy"),
        transfer=TransferSettings("direct"),
    )


def run(model: Path, is_short: bool) -> InterferenceResult:
    """Measure on this machine."""
    here = cores()
    if len(here) < 2:
        raise ConfigurationError(f"this benchmark needs 2 cores, the machine offers {len(here)}")
    if model_context_tokens(model) < CONTEXT_TOKENS:
        raise ConfigurationError(
            f"model {model} has a context below the {CONTEXT_TOKENS} tokens that this benchmark needs"
        )
    extent = SHORT if is_short else Extent()
    result = InterferenceResult(model=model.name, extent=asdict(extent))
    with ExitStack() as stack:
        mailbox = stack.enter_context(tempfile.TemporaryDirectory())

        def start(
            core: int, settings: InstanceSettings | None, num_batched_tokens: int = CONTEXT_TOKENS
        ) -> EngineProcess:
            spec = EngineSpec(
                str(model), settings, here[core], max_num_batched_tokens=num_batched_tokens, kv_lease_s=120,
                max_model_len_tokens=CONTEXT_TOKENS,
            )  # fmt: skip
            return stack.enter_context(EngineProcess(spec))

        say("starting four engines")
        lab = Lab(
            {COUPLED: start(0, None), CHUNKED: start(0, None, CHUNK_TOKENS)},
            start(0, _settings(Role.PREFILL, "p")),
            start(1, _settings(Role.DECODE, "d")),
            mailbox,
        )
        for engine in (*lab.coupled.values(), lab.prefill, lab.decode):
            engine.wait_until_ready()
        say("warming them")
        for system in SYSTEMS:
            lab.prefiller(system).call(queue_at_once, [LIGHT_TOKENS] * 63 + [HEAVY_TOKENS])
            _beside(lab, extent, system, LIGHT_CONTEXT_TOKENS, 2, HEAVY_TOKENS)
        for number in range(extent.num_rounds):
            for system in in_turn(SYSTEMS, number):
                say(f"round {number + 1} of {extent.num_rounds}: {system}")
                result.prefill_prefill += _prefill_prefill(lab, system, number)
                result.prefill_decode += _prefill_decode(lab, extent, system, number)
                result.mixed.append(_mixed(lab, extent, system, number))
        result.decode_decode += _decode_decode(lab, extent)
    return result


def _prefill_prefill(lab: Lab, system: str, number: int) -> Iterator[Row]:
    """Figure 3: latency of each prompt of a queue, in its order. The first after a change of systems is not counted."""
    lab.prefiller(system).call(queue_at_once, [LIGHT_TOKENS])
    for queue, lengths in QUEUES.items():
        latency_ms = lab.prefiller(system).call(queue_at_once, lengths)
        yield {"system": system, "round": number, "queue": queue, "latency_ms": rounded(latency_ms)}


def _prefill_decode(lab: Lab, extent: Extent, system: str, number: int) -> Iterator[Row]:
    """Figure 4: light decodes and newcomers of both kinds, then one heavy decode."""
    for num_decodes in extent.num_decodes:
        for newcomer in (LIGHT_TOKENS, HEAVY_TOKENS):
            yield {"round": number, **_beside(lab, extent, system, LIGHT_CONTEXT_TOKENS, num_decodes, newcomer)}
    yield {"round": number, **_beside(lab, extent, system, HEAVY_CONTEXT_TOKENS, 1, HEAVY_TOKENS)}


def _beside(lab: Lab, extent: Extent, system: str, context: int, num_decodes: int, newcomer: int) -> Row:
    """Newcomers one after the other beside running decodes. `before_ms`, `during_ms`: gaps of a decode's tokens until
    the first newcomer, and from a newcomer's arrival to its first token; then times from `add`, of each newcomer."""
    decoder = lab.decoder(system)
    decoder.call(start_decodes, num_decodes, context)
    count = extent.num_light_newcomers if newcomer == LIGHT_TOKENS else 1
    jobs = newcomers([newcomer] * count, [extent.before_s * (i + 1) for i in range(count)])
    seen, added_s, prefilled_s = lab.watch(system, jobs)
    decoder.call(stop)
    spans = list(zip(added_s, seen.first_token_s, strict=True))
    return {
        "system": system,
        "decode_context_tokens": context,
        "num_decodes": num_decodes,
        "newcomer_tokens": newcomer,
        "before_ms": rounded(gaps_ms(seen.decode_times_s, seen.start_s, added_s[0])),
        "during_ms": rounded([gap for span in spans for gap in gaps_ms(seen.decode_times_s, *span)]),
        "prefill_ms": rounded([1000 * (end - begin) for begin, end in zip(added_s, prefilled_s, strict=True)]),
        "first_token_ms": rounded([1000 * (end - begin) for begin, end in spans]),
    }


def _mixed(lab: Lab, extent: Extent, system: str, number: int) -> Row:
    """Gaps of a decode's tokens while prompts arrive at random, and how long those take to their first tokens."""
    jobs, decoder = arrivals(extent, number), lab.decoder(system)
    decoder.call(start_decodes, extent.mixed_num_decodes, LIGHT_CONTEXT_TOKENS)
    seen, *_ = lab.watch(system, jobs)
    decoder.call(stop)
    waits_ms = [1000 * (end - seen.start_s - job.arrival_s) for job, end in zip(jobs, seen.first_token_s, strict=True)]
    return {
        "system": system,
        "round": number,
        "gap_ms": rounded(gaps_ms(seen.decode_times_s, seen.start_s, seen.start_s + extent.mixed_s)),
        "newcomer_tokens": [len(job.prompt_token_ids) for job in jobs],
        "first_token_ms": rounded(waits_ms),
    }


def _decode_decode(lab: Lab, extent: Extent) -> Iterator[Row]:
    """Figure 5: a row per instance of a layout. The prefill instance becomes a second decode instance meanwhile."""
    engines = (lab.prefill, lab.decode)
    size, half = extent.batch_size, extent.batch_size // 2
    layouts: dict[str, tuple[tuple[int, int], ...]] = {  # (light, heavy) decodes of each instance
        ALL_LIGHT: ((size, 0),),
        HALF_HEAVY: ((half, half),),
        BALANCED: ((half, half), (half, half)),
        IMBALANCED: ((size, 0), (0, size)),
    }
    lab.prefill.call(reconfigure, _settings(Role.DECODE, "p"))
    _both(engines, hold_heavy, [(half, HELD_CONTEXT_TOKENS), (size, HELD_CONTEXT_TOKENS)])
    for number in range(extent.num_rounds):
        say(f"figure 5: round {number + 1} of {extent.num_rounds}")
        for layout in in_turn(tuple(layouts), number):
            parts = layouts[layout]
            _both(engines, lay_out, [(*part, next(_serial)) for part in parts])
            for instance, figures in enumerate(_both(engines, run_batch, [(extent.batch_s,)] * len(parts))):
                num_light, num_heavy = parts[instance]
                batch = {"num_light": num_light, "num_heavy": num_heavy}
                yield {"round": number, "layout": layout, "instance": instance, **batch, **figures}


def _both(
    engines: Sequence[EngineProcess], function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]
) -> list[T]:
    """One call per engine, at the same time, as long as there are arguments."""
    used = engines[: len(arguments)]
    for engine, args in zip(used, arguments, strict=True):
        engine.start_call(function, *args)
    return [engine.result(2 * RUN_TIMEOUT_S) for engine in used]
