"""`predictor`: what a forecast costs, alone and beside the prefill that it serves (TetriInfer figure 17).

Three parts, each with raw times in the result:
  latency      one prompt at a time on one core: tokenise, run, calibrate; beside the target's own prefill of the same
               prompt on the same core, in blocks turn and turn about
  batches      prompts that wait together, under several cutting limits
  co-running   a prefill instance without a predictor, with one in parallel mode and in sequential mode, the predictor
               on a core of its own and on the engine's: latency at Poisson arrivals, throughput of a burst

All instances are up the whole time and take turns: the others sleep, and no turn waits for a start.

`--short` shows that it works and measures nothing worth quoting.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.table import Table

from benchmarks.engines import SHORTEST_LEASE_S, set_shortest_lease
from benchmarks.record import Record, deliver, describe, say
from pipeline.calibrate import CALIBRATION
from pipeline.checkpoint import Checkpoint
from pipeline.export import with_probabilities, write_onnx
from pipeline.params import load_params
from pipeline.target import load_tokenizer
from pipeline.train import CHECKPOINT
from serving_plugin.bench.metrics import paired_ratio
from serving_plugin.bench.systems import detect_hardware, executable, free_ports
from serving_plugin.bench.workloads import read_pairs
from serving_plugin.control.launcher import Device, InstancePlan, base_url, build_instance_command
from serving_plugin.core.config import InstanceSettings, PredictionSettings, TransferSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import Role
from serving_plugin.predictor.conversation import Message
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import DEFAULT_MODEL_URI
from serving_plugin.predictor.service import QueuedRequest, next_batch
from serving_plugin.predictor.spec import MODEL_FILE, TOKENIZER_FILE
from serving_plugin.processes import Child, ChildSpec, stop_all, wait_until_ready
from serving_plugin.wire import LEG_HEADER, REQUEST_ID_HEADER, Leg

LOG_FOLDER = Path("logs/bench/predictor")
READY_TIMEOUT_S = 600.0
CUTTING_LIMITS_TOKENS = (128, 256)
WIDE_INPUT_TOKENS = 512
BATCH_SIZE = 8
NUM_LATENCY_BLOCKS = 3
# After that an instance that was asked sleeps: its leases have run out, and vLLM's readers spin no more.
REST_S = SHORTEST_LEASE_S + 2.0


__all__ = ["deliver", "run"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. Prompt lengths are in the target's tokens.

    The co-running instance gets `num_requests` at `rate_per_s`, then the same ones all at once.
    """

    prompt_tokens: tuple[int, ...] = (16, 128, 512)
    num_prompts: int = 60
    num_batch_prompts: int = 256
    num_requests: int = 60
    rate_per_s: float = 3.0
    num_rounds: int = 5


SHORT = Extent(prompt_tokens=(16, 128), num_prompts=5, num_batch_prompts=16, num_requests=8, num_rounds=1)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a predictor beside a prefill instance. `mode` None: no predictor."""

    name: str
    mode: str | None
    has_own_core: bool


SETTINGS = (
    Setting("none", None, False),
    Setting("parallel, own core", "parallel", True),
    Setting("sequential, own core", "sequential", True),
    Setting("parallel, engine's core", "parallel", False),
    Setting("sequential, engine's core", "sequential", False),
)


@dataclass(slots=True, kw_only=True)
class PredictorResult(Record):
    """Everything measured; times in milliseconds."""

    model: str
    extent: dict[str, Any]
    latency: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    co_running: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every part brought figures."""
        return bool(self.latency and self.batches and self.co_running)

    def tables(self) -> Iterator[Table]:
        """One table per part, for the console."""
        table = Table(title="One prompt on one core, ms")
        for column in ("target's tokens", "predictor p50", "p99", "target's prefill p50", "p99", "ratio of p50"):
            table.add_column(column, justify="right")
        for row in self.latency:
            own, target = row["predictor_ms"], row["prefill_ms"]
            figures = (own["p50"], own["p99"], target["p50"], target["p99"])
            table.add_row(
                str(row["prompt_tokens"]), *(f"{x:.1f}" for x in figures), f"{own['p50'] / target['p50']:.1%}"
            )
        yield table
        table = Table(title=f"{self.extent['num_batch_prompts']} prompts that wait together, one core")
        for column in ("predictor", "prompts/s", "half are done after, ms"):
            table.add_column(column, justify="left" if column == "predictor" else "right")
        for row in self.batches:
            table.add_row(row["case"], f"{row['prompts_per_s']:.0f}", f"{np.percentile(row['done_ms'], 50):.0f}")
        yield table
        table = Table(title="Prefill instance under load, ms from request to prefill's answer")
        columns = ("mean", "p50", "p99", "mean against none", "requests/s, all at once", "against none")
        for column in ("predictor", *columns, "forecasts in time, Poisson / burst"):
            table.add_column(column, justify="left" if column == "predictor" else "right")
        for name in dict.fromkeys(row["setting"] for row in self.co_running):
            rows = [row for row in self.co_running if row["setting"] == name]
            times = [ms for row in rows for ms in row["latency_ms"]]
            on_time = [
                float(np.mean([is_model for row in rows for is_model in row[key]]))
                for key in ("is_forecast_of_model", "is_burst_forecast_of_model")
            ]
            figures = (float(np.mean(times)), *np.percentile(times, [50, 99]))
            rate = float(np.mean([burst_rate(row) for row in rows]))
            changes = self.change(name, mean_latency), self.change(name, burst_rate)
            share = "-" if name == "none" else " / ".join(f"{one:.0%}" for one in on_time)
            table.add_row(name, *(f"{x:.1f}" for x in figures), changes[0], f"{rate:.2f}", changes[1], share)
        yield table

    def change(self, setting: str, figure: Callable[[dict[str, Any]], float]) -> str:
        """A row's figure against `none`: mean over the rounds of the ratio, with 95 % bounds."""
        figures = {(row["setting"], row["round"]): figure(row) for row in self.co_running}
        rounds = [number for name, number in figures if name == setting and ("none", number) in figures]
        if setting == "none" or not rounds:
            return "-"
        found = paired_ratio([figures[setting, i] for i in rounds], [figures["none", i] for i in rounds])
        assert found is not None  # a prefill takes time
        if found.lower_95 is None or found.upper_95 is None:
            return f"{found.mean - 1:+.1%}"
        return f"{found.mean - 1:+.1%} [{found.lower_95 - 1:+.1%}, {found.upper_95 - 1:+.1%}]"


def mean_latency(row: dict[str, Any]) -> float:
    """Milliseconds at Poisson arrivals."""
    return float(np.mean(row["latency_ms"]))


def burst_rate(row: dict[str, Any]) -> float:
    """Requests a second when all come at once."""
    return len(row["latency_ms"]) / float(row["burst_s"])


def run(model: Path, source: str, is_short: bool) -> PredictorResult:
    """Measure on this machine, with the champion of the registry in the working directory."""
    hardware = detect_hardware()
    if len(hardware.cores) < 2:
        raise ConfigurationError(f"this benchmark needs 2 cores, the machine offers {len(hardware.cores)}")
    extent = SHORT if is_short else Extent()
    predictor = LengthPredictor.load(DEFAULT_MODEL_URI, num_threads=1)
    predictor.require_target(model.name)
    result = PredictorResult(
        model=describe(predictor),
        extent=asdict(extent),
    )
    texts = [pair.prompt for pair in read_pairs(source)]
    random.Random(0).shuffle(texts)
    with _on_cores(hardware.cores[:1]):
        say("batches of mixed prompts under several input limits")
        result.batches = measure_batches(predictor, texts[: extent.num_batch_prompts], LOG_FOLDER)
    with ExitStack() as stack:
        urls = {}
        for setting in SETTINGS:
            say(f"starting a prefill instance, predictor: {setting.name}")
            urls[setting] = stack.enter_context(_instance(setting, model, hardware.cores[:2]))
        say("one prompt at a time, beside the target's own prefill")
        latency = measure_latency(predictor, model, urls[SETTINGS[0]], texts, extent, hardware.cores[0])
        result.latency = asyncio.run(latency)
        for number in range(extent.num_rounds):
            # turned round every other time, so that slow drift of the machine cancels out
            for setting in SETTINGS if number % 2 == 0 else SETTINGS[::-1]:
                say(f"co-running, round {number + 1} of {extent.num_rounds}: {setting.name}")
                time.sleep(REST_S)
                row = asyncio.run(measure_co_running(urls[setting], model, texts, extent, number))
                result.co_running.append({"setting": setting.name, "round": number, **row})
    return result


# Batches


def measure_batches(predictor: LengthPredictor, texts: Sequence[str], scratch: Path) -> list[dict[str, Any]]:
    """When each of many prompts that wait together has its forecast: as served, and in float32 with the model's own
    input and with a wide one under several cutting limits.

    8-bit weights run one by one (one scale of activations per run), so that the limit concerns float32 alone. A wide
    input costs what it costs whatever the weights were trained for; its accuracy is not at issue here. The batches are
    those that the service makes (`service.next_batch`).
    """
    own = predictor.spec.input.max_tokens
    exact, wide = (float32_predictor(limit, scratch / f"float32-{limit}") for limit in (own, WIDE_INPUT_TOKENS))
    cases = [(f"as served, {own} tokens", predictor, own), (f"float32, {own} tokens", exact, own)]
    cases += [
        (f"float32, up to {WIDE_INPUT_TOKENS} tokens, cut at {limit}", wide, limit) for limit in CUTTING_LIMITS_TOKENS
    ]
    cases.append((f"float32, up to {WIDE_INPUT_TOKENS} tokens, no limit", wide, WIDE_INPUT_TOKENS))
    rows = []
    for name, model, limit in cases:
        encoded = [model.encode((Message("user", text),)) for text in texts]
        model.probabilities(encoded[:8])
        batch_size = 1 if model.is_quantised else BATCH_SIZE
        queue = deque(QueuedRequest(b"", str(i), one, 0.0) for i, one in enumerate(encoded))
        done_ms: list[float] = []
        began = time.perf_counter()
        while queue:
            batch = next_batch(queue, batch_size, limit)
            model.probabilities([request.encoded for request in batch])
            done_ms += [(time.perf_counter() - began) * 1000] * len(batch)
        rows.append({"case": name, "prompts_per_s": len(texts) / (done_ms[-1] / 1000), "done_ms": done_ms})
    return rows


def float32_predictor(limit_tokens: int, folder: Path) -> LengthPredictor:
    """The pipeline's checkpoint as the export stage writes it without 8-bit weights, behind another input limit."""
    loaded = Checkpoint.load(CHECKPOINT, CALIBRATION)
    spec, settings = loaded.spec, load_params().export
    folder.mkdir(parents=True, exist_ok=True)
    model = with_probabilities(loaded.network, spec.calibration.temperature)
    write_onnx(model, folder / MODEL_FILE, spec.pad_token_id, settings.opset)
    shutil.copyfile(CHECKPOINT / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    replace(spec, input=replace(spec.input, max_tokens=limit_tokens)).save(folder)
    return LengthPredictor.load(str(folder), num_threads=1)


# Latency


async def measure_latency(
    predictor: LengthPredictor, model: Path, url: str, texts: Sequence[str], extent: Extent, core: int
) -> list[dict[str, Any]]:
    """Forecasts and prefills of the same prompts, a block of each, turn and turn about, the other side at rest.

    The instance has no predictor; both run on `core`.
    """
    rows = []
    tokenizer = load_tokenizer(str(model))
    async with aiohttp.ClientSession() as session:
        for length in extent.prompt_tokens:
            prompts = prompts_of_length(texts, tokenizer, length, extent.num_prompts)
            own: list[float] = []
            prefill: list[float] = []
            for block in range(NUM_LATENCY_BLOCKS):
                await asyncio.sleep(REST_S)
                chosen = prompts[block::NUM_LATENCY_BLOCKS]
                with _on_cores((core,)):
                    predictor.predict_texts(chosen[:2])
                    for prompt in chosen:
                        began = time.perf_counter()
                        predictor.predict_texts([prompt])
                        own.append((time.perf_counter() - began) * 1000)
                for number, prompt in enumerate([*chosen[:2], *chosen]):
                    request_id = f"latency-{length}-{block}-{number}"
                    took_ms, _ = await _prefill_leg(session, url, model.name, prompt, request_id)
                    if number >= 2:  # the first ones wake the instance
                        prefill.append(took_ms)
            rows.append(
                {
                    "prompt_tokens": length,
                    "predictor_ms": _percentiles(own),
                    "prefill_ms": _percentiles(prefill),
                    "predictor_raw_ms": own,
                    "prefill_raw_ms": prefill,
                }
            )
    return rows


def prompts_of_length(texts: Sequence[str], tokenizer: Any, num_tokens: int, count: int) -> list[str]:
    """`count` different prompts cut from real text to exactly `num_tokens` of the target's tokens (re-tokenised: within
    a token or two)."""
    found = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= num_tokens:
            found.append(tokenizer.decode(ids[:num_tokens]))
            if len(found) == count:
                return found
    raise ConfigurationError(f"the source holds only {len(found)} of {count} prompts of {num_tokens} tokens")


# Co-running


async def measure_co_running(
    url: str, model: Path, texts: Sequence[str], extent: Extent, round_number: int
) -> dict[str, Any]:
    """Prefill legs on one instance at Poisson arrivals, then all at once; the same requests for every setting."""
    tokenizer = load_tokenizer(str(model))
    rng = random.Random(1)
    prompts = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if 8 <= len(ids) <= 512:
            prompts.append(text)
        if len(prompts) == extent.num_requests:
            break
    arrivals = np.cumsum([rng.expovariate(extent.rate_per_s) for _ in prompts])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def leg(number: int, phase: str) -> tuple[float, bool]:
            return await _prefill_leg(session, url, model.name, prompts[number], f"{phase}-{round_number}-{number}")

        for number in range(4):
            await leg(number, "warm")
        began = time.perf_counter()

        async def at_arrival(number: int) -> tuple[float, bool]:
            await asyncio.sleep(max(0.0, arrivals[number] - (time.perf_counter() - began)))
            return await leg(number, "poisson")

        answers = await asyncio.gather(*(at_arrival(number) for number in range(len(prompts))))
        elapsed_s = time.perf_counter() - began
        began = time.perf_counter()
        burst = await asyncio.gather(*(leg(number, "burst") for number in range(len(prompts))))
        burst_s = time.perf_counter() - began
    return {
        "latency_ms": [answer[0] for answer in answers],
        "is_forecast_of_model": [answer[1] for answer in answers],
        "elapsed_s": elapsed_s,
        "burst_s": burst_s,
        "is_burst_forecast_of_model": [answer[1] for answer in burst],
    }


async def _prefill_leg(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, request_id: str
) -> tuple[float, bool]:
    """Milliseconds of one prefill leg as a gateway sends it, and whether the predictor's forecast was in time."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "tetri": {"request_id": request_id, "arrival_s": time.time(), "max_tokens": 256},
        },
    }
    headers = {LEG_HEADER: Leg.PREFILL.value, REQUEST_ID_HEADER: request_id}
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        if response.status != 200:
            raise ConfigurationError(f"prefill leg {request_id} failed with {response.status}: {answer}")
    elapsed_ms = (time.perf_counter() - began) * 1000
    tetri = (answer.get("kv_transfer_params") or {}).get("tetri") or {}
    return elapsed_ms, tetri.get("forecast_source") == "model"


@contextmanager
def _instance(setting: Setting, model: Path, cores: tuple[int, ...]) -> Iterator[str]:
    """A running prefill instance, engine on the first core; its predictor on the second, on the first, or none."""
    (port,) = free_ports(1)
    url = base_url("127.0.0.1", port)
    prediction = PredictionSettings()
    if setting.mode is not None:
        core = cores[1] if setting.has_own_core else cores[0]
        prediction = PredictionSettings(model=DEFAULT_MODEL_URI, mode=setting.mode, core=core)
    settings = InstanceSettings(
        Role.PREFILL, "p0", url, prediction=prediction, transfer=TransferSettings(link="direct")
    )
    plan = InstancePlan(
        str(model), settings, Device.CPU, "127.0.0.1", port, served_model_name=model.name, kv_cache_gib=1,
        cores=cores[:1], is_local_model=True,
        # no prefix caching: the burst's prompts came before
        vllm_flags=("--max-num-batched-tokens", "512", "--max-num-seqs", "64", "--no-enable-prefix-caching"),
    )  # fmt: skip
    environment, argv = build_instance_command(plan)
    set_shortest_lease(argv)  # nobody pulls the KV here, and an instance that holds pinned KV keeps stepping
    LOG_FOLDER.mkdir(parents=True, exist_ok=True)
    # not pinned as a whole: the predictor must be free to go to its core; vLLM pins its own threads
    spec = ChildSpec("p0", (executable("vllm"), *argv[1:]), LOG_FOLDER / f"{setting.name}.log", environment, cores)
    child = Child(spec)
    try:
        wait_until_ready({f"{url}/health": child}, READY_TIMEOUT_S)
        yield url
    finally:
        stop_all([child])


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """This process on `cores` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _percentiles(times_ms: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times_ms, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
