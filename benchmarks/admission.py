"""`admission`: who may start to decode when KV memory is short, by policy and by where ranges come from (figure 18).

Held-out ShareGPT requests whose KV cache waits on a prefill engine, and a decode engine whose pool is so small that
vLLM's own rule (greedy) preempts. A request ends where its recorded reply ended; policies see its forecast and the
limit of the client alone. Ranges come from:
  oracle      the true bucket of 200 tokens: the paper's 100 % accuracy
  calibrated  the champion's calibrated distribution, ranges at 90 % coverage: what `--forecast-range quantile` serves
  argmax      the champion's likeliest bucket: the paper's way
  history     lengths of the calibration split's replies, no look at the prompt

Two decode engines run two systems at once, one core each, on the same requests; which system gets which core is drawn
anew each round. The prefill engine only holds KV meanwhile, on the first core, which is slower for it. The machine
drifts, so greedy runs in every third turn, on either core in turn, and each system is compared with the greedy runs
on its own core that are nearest in time. Two parts: all requests at once (as in the paper), and Poisson arrivals.
"greedy, overtaking" is the control for the other policies' licence to pass a refused request.

`--short` shows that it works and measures nothing worth quoting.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import record
from benchmarks.engines import Job, Mailbox, cores, decode
from benchmarks.record import Record, describe, save_figure, say
from pipeline.label import LABELLED_FOLDER
from pipeline.params import load_params
from pipeline.target import load_tokenizer
from pipeline.train import split_name
from serving_plugin.bench.metrics import paired_ratio
from serving_plugin.bench.report import write_atomically
from serving_plugin.core.config import (
    AdmitSettings,
    ChunkSettings,
    DispatchSettings,
    ForecastSettings,
    InstanceSettings,
    TransferSettings,
)
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast, LengthRange
from serving_plugin.core.types import Role
from serving_plugin.engine.dispatcher import Dispatcher
from serving_plugin.engine.offline_process import EngineProcess, EngineSpec
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import DEFAULT_MODEL_URI
from serving_plugin.predictor.rows import LabelledRow, read_rows

__all__ = ["deliver", "draw", "run"]

MAX_PROMPT_TOKENS = 256
MAX_OUTPUT_TOKENS = 512  # what the client asks for: longer replies end there
MIN_OUTPUT_TOKENS = 8
BLOCK_SIZE_TOKENS = 32
CHUNK_TOKENS = 128
COVERAGE = 0.9
GRANULARITY_TOKENS = 200
HISTORY_SIZE = 256
RUN_TIMEOUT_S = 1200.0
UNFINISHED = Path("logs/bench/admission.json")  # rounds so far: the full extent takes two hours
HOLD_PAUSE_S = 0.05
GOAL_JCT, GOAL_PREEMPTIONS = 0.92, 0.10  # of greedy's
SOURCES = ("oracle", "calibrated", "argmax", "history")
POLICIES = ("reserve_static", "reserve_static_net", "reserve_dynamic", "reserve_peak", "reserve_expected")


@dataclass(frozen=True, slots=True)
class System:
    """A policy, the order of admission and where its ranges come from. `source` None: it reads none."""

    policy: str
    source: str | None = None
    order: str = "arrival"
    overtaking: str = "by_policy"

    @property
    def name(self) -> str:
        """One word for tables and files."""
        order = "" if self.order == "arrival" else ", shortest first"
        overtaking = "" if self.overtaking == "by_policy" else ", overtaking"
        return f"{self.policy}{overtaking}{order}{f' ({self.source})' if self.source else ''}"


GREEDY = System("greedy")
CONTROL = System("greedy", overtaking="always")
GREEDY_EVERY_TURNS = 3
SHORTEST = (
    System("greedy", "calibrated", "shortest_expected"),
    System("reserve_dynamic", "calibrated", "shortest_expected"),
    System("reserve_expected", "calibrated", "shortest_expected"),
)
AT_ONCE = (CONTROL, *(System(policy, source) for source in SOURCES for policy in POLICIES), *SHORTEST)
POISSON = (
    System("reserve_dynamic", "calibrated"),
    System("reserve_peak", "calibrated"),
    System("reserve_expected", "calibrated"),
    System("reserve_expected", "calibrated", "shortest_expected"),
)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. `rate_per_s` of the Poisson part; `num_blocks`: the decode engine's pool."""

    num_requests: int = 48
    num_rounds: int = 5
    num_blocks: int = 96
    rate_per_s: float = 0.8
    at_once: tuple[System, ...] = AT_ONCE
    poisson: tuple[System, ...] = POISSON


SHORT = Extent(
    num_requests=8,
    num_rounds=1,
    num_blocks=26,
    at_once=(System("reserve_expected", "calibrated"),),
    poisson=(),
)


@dataclass(slots=True, kw_only=True)
class AdmissionResult(Record):
    """Every run's figures; times in seconds, JCT from the arrival at the decode engine with the KV cache ready."""

    model: str
    predictor: str
    extent: dict[str, Any]
    data: str = ""  # digest of the labelled replies that requests and history are drawn from
    requests: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every system ran in every round."""
        wanted = {(part, System(**one).name) for part in ("at_once", "poisson") for one in self.extent[part]}
        numbers = range(self.extent["num_rounds"])
        return {(*one, number) for one in wanted for number in numbers} <= {
            (one["part"], one["system"], one["round"]) for one in self.runs
        }

    def tables(self) -> Iterator[Table]:
        """One table per part: each system against greedy of the same round."""
        for part in ("at_once", "poisson"):
            rows = summary(self.runs, part)
            if not rows:
                continue
            what = "all at once" if part == "at_once" else f"Poisson, {self.extent['rate_per_s']:g}/s"
            count = f"{self.extent['num_requests']} requests, {self.extent['num_blocks']} blocks"
            table = Table(title=f"Admission, {count}, {what}")
            for column in (
                "system",
                "mean JCT, s",
                "against greedy",
                "p99",
                "preemptions",
                "recomputed tokens",
                "goal",
            ):
                table.add_column(column, justify="left" if column == "system" else "right")
            for row in rows:
                low, high = row["jct_low"], row["jct_high"]
                bounds = "" if low is None else f" [{low - 1:+.1%}, {high - 1:+.1%}], {row['num_pairs']} pairs"
                table.add_row(
                    row["system"],
                    f"{row['mean_jct_s']:.1f}",
                    "" if row["jct_ratio"] is None else f"{row['jct_ratio'] - 1:+.1%}{bounds}",
                    f"{row['p99_jct_s']:.1f}",
                    f"{row['num_preemptions']:.1f}",
                    f"{row['num_recomputed_tokens']:.0f}",
                    row["goal"],
                )
            yield table


def summary(runs: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """Per system of a part: means over rounds, and ratios to greedy's mean JCT and preemptions of the same core.

    `goal`: "met" where the upper bounds of both ratios lie under `GOAL_JCT` and `GOAL_PREEMPTIONS`, over five pairs or
    more. A run whose core saw no greedy in its round has no pair.
    """
    ours = [run_ for run_ in runs if run_["part"] == part]
    greedy = [run_ for run_ in ours if run_["system"] == GREEDY.name]
    rows = []
    for system in dict.fromkeys(run_["system"] for run_ in ours):
        same = [run_ for run_ in ours if run_["system"] == system]
        pairs = [(one, near) for one in same if (near := nearest(greedy, one))]
        if system == GREEDY.name:
            pairs = []
        jct = paired_ratio([one["mean_jct_s"] for one, _ in pairs], [_mean(near, "mean_jct_s") for _, near in pairs])
        preemptions = paired_ratio(
            [one["num_preemptions"] for one, _ in pairs], [_mean(near, "num_preemptions") for _, near in pairs]
        )
        is_met = jct is not None and jct.meets(GOAL_JCT)
        is_met = is_met and preemptions is not None and preemptions.meets(GOAL_PREEMPTIONS)
        means = {
            key: float(np.mean([_mean(figures, key) for figures in _by_round(same)]))
            for key in ("mean_jct_s", "p99_jct_s", "makespan_s", "num_preemptions", "num_recomputed_tokens")
        }
        rows.append(
            {
                "system": system,
                **means,
                "num_pairs": len(pairs),
                "jct_ratio": jct.mean if jct else None,
                "jct_low": jct.lower_95 if jct else None,
                "jct_high": jct.upper_95 if jct else None,
                "preemptions_high": preemptions.upper_95 if preemptions else None,
                "goal": "" if system == GREEDY.name else "met" if is_met else "missed",
            }
        )
    return rows


def nearest(greedy: Sequence[dict[str, Any]], run_: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy's runs of the same round and core: the last one before and the first one after."""
    there = [one for one in greedy if (one["round"], one["core"]) == (run_["round"], run_["core"])]
    before = [one for one in there if one["turn"] < run_["turn"]]
    after = [one for one in there if one["turn"] > run_["turn"]]
    return [*before[-1:], *after[:1]]


def _by_round(runs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    numbers = dict.fromkeys(one["round"] for one in runs)
    return [[one for one in runs if one["round"] == number] for number in numbers]


def turns_of(systems: Sequence[System], width: int, number: int, part: str) -> list[list[System]]:
    """Who runs beside whom in round `number`: `width` systems a turn in random order, one a core.

    Greedy is in every third turn and in the last, on the first core and the last one in turn, so that each core has
    runs to compare with.
    """
    left = random.Random(f"{part} {number}").sample(systems, len(systems))
    turns: list[list[System]] = []
    num_greedy = number
    while left:
        is_with_greedy = len(turns) % GREEDY_EVERY_TURNS == 0 or len(left) < width
        others = [left.pop() for _ in range(min(len(left), max(1, width - is_with_greedy)))]
        if is_with_greedy and width > 1:
            others.insert(0 if num_greedy % 2 == 0 else len(others), GREEDY)
            num_greedy += 1
        turns.append(others)
        if is_with_greedy and width == 1:
            turns.append([GREEDY])
    if any(all(turn[core : core + 1] != [GREEDY] for turn in turns) for core in range(width)):
        turns.append([GREEDY] * width)
    return turns


def _mean(runs: Sequence[dict[str, Any]], key: str) -> float:
    return float(np.mean([one[key] for one in runs]))


def run(model: Path, is_short: bool) -> AdmissionResult:
    """Measure with the champion of the registry on the pipeline's labelled test split."""
    extent = SHORT if is_short else Extent()
    predictor = LengthPredictor.load(DEFAULT_MODEL_URI, num_threads=1)
    requests = _Requests(model, predictor)
    fresh = AdmissionResult(
        model=model.name, predictor=describe(predictor), extent=asdict(extent), data=_labelled_digest()
    )
    result = fresh if is_short else _continued(fresh)
    available = cores()
    prefill = InstanceSettings(Role.PREFILL, "p", "http://p", transfer=TransferSettings("direct", pinned_budget=1.0))
    spec = EngineSpec(
        str(model),
        prefill,
        core=available[0],
        block_size_tokens=BLOCK_SIZE_TOKENS,
        max_model_len_tokens=MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS,
        max_num_batched_tokens=512,
        kv_lease_s=3600,
        enable_prefix_caching=True,  # the systems of a round get the same prompts
    )
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        holder = stack.enter_context(EngineProcess(spec))
        decoders = [
            stack.enter_context(EngineProcess(_decode_spec(spec, extent, core)))
            for core in dict.fromkeys(available[:2])
        ]
        for engine in (holder, *decoders):
            engine.wait_until_ready()
        for number in range(extent.num_rounds):
            for part, systems in (("at_once", extent.at_once), ("poisson", extent.poisson)):
                if not systems or any(one["part"] == part and one["round"] == number for one in result.requests):
                    continue  # measured before this run was interrupted
                drawn = requests.draw(extent, number, None if part == "at_once" else extent.rate_per_s)
                runs = []
                for position, turn in enumerate(turns_of(systems, len(decoders), number, part)):
                    figures = _turn(holder, decoders, turn, drawn, requests, Path(folder))
                    for core, (system, one) in enumerate(zip(turn, figures, strict=True)):
                        place = {"part": part, "round": number, "turn": position, "core": available[core]}
                        runs.append({**place, "system": system.name, **one})
                        say(
                            f"{part} round {number + 1}/{extent.num_rounds}: {system.name}: mean JCT "
                            f"{one['mean_jct_s']:.1f} s, {one['num_preemptions']} preemptions"
                        )
                result.runs += runs
                result.requests.append({"part": part, "round": number, "requests": [asdict(one) for one in drawn]})
                if not is_short:
                    write_atomically(UNFINISHED, json.dumps(asdict(result)))
    return result


def deliver(result: AdmissionResult, json_path: Path | None, report_path: Path | None) -> bool:
    """As every benchmark's; what was kept of an unfinished run goes once the figures are safe."""
    is_complete = record.deliver(result, json_path, report_path)
    if json.dumps(result.extent) == json.dumps(asdict(Extent())):  # not after a short form
        UNFINISHED.unlink(missing_ok=True)
    return is_complete


def _labelled_digest() -> str:
    files = [LABELLED_FOLDER / f"{split}.jsonl" for split in ("test", "calibration")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _continued(fresh: AdmissionResult) -> AdmissionResult:
    """The rounds of a run of the same extent, code and machine that was interrupted, or a fresh start."""
    if not UNFINISHED.exists():
        return fresh
    before = json.loads(UNFINISHED.read_text())
    same = ("model", "predictor", "extent", "data", "machine", "versions", "code")
    if any(before.get(name) != json.loads(json.dumps(getattr(fresh, name))) for name in same):
        return fresh
    say(f"going on after {len(before['requests'])} measured parts of {UNFINISHED}; delete it to start afresh")
    return AdmissionResult(**before)


def _decode_spec(like: EngineSpec, extent: Extent, core: int) -> EngineSpec:
    return EngineSpec(
        like.model,
        _settings(GREEDY),
        core=core,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        num_blocks=extent.num_blocks,
        max_model_len_tokens=like.max_model_len_tokens,
        max_num_batched_tokens=512,
        kv_lease_s=like.kv_lease_s,
    )


def _settings(system: System) -> InstanceSettings:
    return InstanceSettings(
        Role.DECODE,
        "d",
        "http://d",
        admit=AdmitSettings(system.policy, system.order, system.overtaking),
        chunk=ChunkSettings(chunk_tokens=CHUNK_TOKENS),
        forecast=_forecast_settings(system.source),
        transfer=TransferSettings("direct"),
    )


def _forecast_settings(source: str | None) -> ForecastSettings:
    is_bucket = source in ("oracle", "argmax")
    return ForecastSettings("argmax" if is_bucket else "quantile", COVERAGE, GRANULARITY_TOKENS, HISTORY_SIZE)


def _turn(
    holder: EngineProcess,
    decoders: Sequence[EngineProcess],
    turn: Sequence[System],
    drawn: Sequence[Drawn],
    requests: _Requests,
    folder: Path,
) -> list[dict[str, Any]]:
    """Run one system on each decode engine, on the same requests; their KV cache is ready before the first starts."""
    groups = []
    for number, system in enumerate(turn):
        box = folder / f"{number}"
        box.mkdir(exist_ok=True)
        groups.append((requests.jobs(drawn, system, str(number)), str(box)))
    holder.start_call(hold, groups)
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while any(len(list(Path(box).glob("*.json"))) < len(jobs) for jobs, box in groups):
        if holder.has_answered:
            holder.result(0.0)  # says why it stopped
        if holder.has_answered or time.monotonic() > deadline_s:
            raise ConfigurationError(f"prefill was not done within {RUN_TIMEOUT_S:g} s")
        time.sleep(0.1)
    for engine, system, (jobs, folder_name) in zip(decoders, turn, groups, strict=False):
        engine.call(configure, _settings(system))
        engine.start_call(decode, jobs, folder_name, RUN_TIMEOUT_S)
    figures = []
    for engine, (jobs, _) in zip(decoders, groups, strict=False):
        progress, steps = engine.result(RUN_TIMEOUT_S + 60)
        figures.append(_figures(progress, steps, jobs))
    holder.result(60.0)
    return figures


def configure(engine: Any, settings: InstanceSettings) -> None:
    """Inside a decode engine: other policies, and an empty record."""
    engine.configure(settings)
    engine.forget()


def hold(engine: Any, groups: Sequence[tuple[Sequence[Job], str]]) -> None:
    """Inside the prefill engine: prefill everything, hand it over, and hold it until it was pulled."""
    for jobs, _ in groups:
        for job in jobs:
            params = {"do_remote_decode": True, "do_remote_prefill": False, "tetri": {"request_id": job.id}}
            engine.add(job.id, job.prompt_token_ids, 1, kv_transfer_params=params)
    engine.run(RUN_TIMEOUT_S)
    for jobs, box in groups:
        mailbox = Mailbox(box)
        for job in jobs:
            mailbox.put(job.id, engine.requests[job.id].kv_transfer_params)
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while engine.scheduler.has_requests() and time.monotonic() < deadline_s:
        engine.step()
        time.sleep(HOLD_PAUSE_S)  # a decode engine shares the core
    engine.forget()


def _figures(progress: Sequence[Any], steps: Sequence[Any], jobs: Sequence[Job]) -> dict[str, Any]:
    jct_s = [one.finished_s - one.added_s for one in progress]
    wrong = [job.id for job, one in zip(jobs, progress, strict=True) if len(one.token_times_s) != job.num_output_tokens]
    if wrong:
        raise ConfigurationError(f"{len(wrong)} requests ended early or late, first {wrong[0]}")
    return {
        "mean_jct_s": float(np.mean(jct_s)),
        "p50_jct_s": float(np.percentile(jct_s, 50)),
        "p99_jct_s": float(np.percentile(jct_s, 99)),
        "makespan_s": max(one.finished_s for one in progress) - min(one.added_s for one in progress),
        "num_preemptions": sum(one.num_preemptions for one in progress),
        "num_recomputed_tokens": sum(step.num_recomputed_tokens for step in steps),
        "num_steps": len(steps),
        "mean_running": float(np.mean([step.num_running for step in steps])),
        "min_free_blocks": min(step.num_free_blocks for step in steps),
        "jct_s": [round(x, 3) for x in jct_s],
    }


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request of a round: which labelled row it is, and its lengths."""

    row: int
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float


class _Requests:
    """The labelled test rows that fit, with what each source says of them."""

    def __init__(self, model: Path, predictor: LengthPredictor) -> None:
        rows = read_rows(LABELLED_FOLDER / "test.jsonl")
        expected = split_name(load_params(), rows)
        if predictor.spec.split != expected:
            raise ConfigurationError(
                f"{predictor.resolved.uri} was trained on other splits ({predictor.spec.split or 'unknown'}; here "
                f"{expected}): promote one of this data (`tetri models list`)"
            )
        tokenizer = load_tokenizer(str(model))
        limits = range(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
        fitting = [row for row in rows if row.output_tokens in limits or row.output_tokens >= MAX_OUTPUT_TOKENS]
        tokenised = [(row, _prompt_ids(tokenizer, row)) for row in fitting]
        self._kept = [(row, ids) for row, ids in tokenised if len(ids) <= MAX_PROMPT_TOKENS]
        if not self._kept:
            raise ConfigurationError(f"no test row has a prompt of {MAX_PROMPT_TOKENS} tokens or fewer")
        kept_rows = [row for row, _ in self._kept]
        self._forecasts = predictor.to_forecasts(predictor.conversation_probabilities(kept_rows))
        calibration = read_rows(LABELLED_FOLDER / "calibration.jsonl")
        self._history = [
            row.output_tokens for row in random.Random(0).sample(calibration, min(HISTORY_SIZE, len(calibration)))
        ]

    def draw(self, extent: Extent, number: int, rate_per_s: float | None) -> list[Drawn]:
        """The requests of round `number`."""
        rng = random.Random(f"admission {number}")
        num_drawn = min(extent.num_requests, len(self._kept))
        arrival_s, drawn = 0.0, []
        for index in rng.sample(range(len(self._kept)), num_drawn):
            row, ids = self._kept[index]
            drawn.append(Drawn(index, len(ids), min(row.output_tokens, MAX_OUTPUT_TOKENS), arrival_s))
            arrival_s += rng.expovariate(rate_per_s) if rate_per_s is not None else 0.0
        return drawn

    def jobs(self, drawn: Sequence[Drawn], system: System, prefix: str) -> list[Job]:
        """The same requests for one system: with the forecast that its source gives."""
        dispatcher = Dispatcher(DispatchSettings(), _forecast_settings(system.source))
        dispatcher.update_history(self._history)
        jobs = []
        for one in drawn:
            forecast = self._forecasts[one.row]
            if system.source == "oracle":
                low = one.num_output_tokens // GRANULARITY_TOKENS * GRANULARITY_TOKENS
                forecast = LengthForecast.one_hot(LengthRange(low, low + GRANULARITY_TOKENS))
            told = None if system.source in (None, "history") else forecast
            in_force, source, length_range, is_heavy = dispatcher.classify(told, MAX_OUTPUT_TOKENS)
            meta = {
                "forecast": {"edges_tokens": in_force.edges_tokens, "probabilities": in_force.probabilities},
                "forecast_source": source,
                "length_range": [length_range.low_tokens, length_range.high_tokens],
                "is_heavy_decode": is_heavy,
            }
            ids = self._kept[one.row][1]
            jobs.append(Job(f"{prefix}-{one.row}", ids, one.num_output_tokens, MAX_OUTPUT_TOKENS, one.arrival_s, meta))
        return jobs


def _prompt_ids(tokenizer: Any, row: LabelledRow) -> tuple[int, ...]:
    messages = [{"role": message.role, "content": message.content} for message in row.messages]
    if tokenizer.chat_template is None:
        return tuple(tokenizer.encode("\n".join(message["content"] for message in messages)))
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def draw(result: AdmissionResult, path: Path) -> None:
    """Change of mean JCT against greedy by policy and source, and preemptions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {row["system"]: row for row in summary(result.runs, "at_once")}
    sources = [source for source in SOURCES if any(f"({source})" in name for name in rows)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    width = 0.8 / max(1, len(sources))
    for number, source in enumerate(sources):
        found = [(position, rows.get(System(policy, source).name)) for position, policy in enumerate(POLICIES)]
        drawn = [(position + number * width, row) for position, row in found if row and row["jct_ratio"] is not None]
        places = [place for place, _ in drawn]
        change = [100 * (row["jct_ratio"] - 1) for _, row in drawn]
        errors = [
            [100 * (row["jct_ratio"] - (row["jct_low"] or row["jct_ratio"])) for _, row in drawn],
            [100 * ((row["jct_high"] or row["jct_ratio"]) - row["jct_ratio"]) for _, row in drawn],
        ]
        left.bar(places, change, width, yerr=errors, capsize=2, label=source)
        right.bar(places, [row["num_preemptions"] for _, row in drawn], width, label=source)
    ticks = [position + 0.4 - width / 2 for position in range(len(POLICIES))]
    for axes in (left, right):
        axes.set_xticks(ticks, [policy.removeprefix("reserve_") for policy in POLICIES])
        axes.set_xlabel("admission policy (reserve_...)")
        axes.grid(axis="y", alpha=0.3)
    left.axhline(100 * (GOAL_JCT - 1), color="black", linestyle="--", linewidth=1, label="goal")
    left.set_ylabel("mean JCT against greedy, %")
    left.legend(title="ranges from", fontsize=8)
    right.axhline(rows[GREEDY.name]["num_preemptions"], color="black", linewidth=1)
    right.annotate("greedy", (ticks[0], rows[GREEDY.name]["num_preemptions"]), fontsize=8, va="bottom")
    right.set_ylabel("preemptions per run")
    figure.suptitle(f"Admission with {result.extent['num_blocks']} KV blocks, {result.model} (TetriInfer figure 18)")
    save_figure(figure, path)
    pyplot.close(figure)
