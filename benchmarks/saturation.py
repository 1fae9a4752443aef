"""`saturation`: prefill and decode time by tokens, batch and context, in interleaved rounds (TetriInfer figure 2).

What `tetri profile` measures (serving_plugin/engine/profile.py), on one core, with a saturation point per round, since
the machine's speed drifts. `--short` shows that it works and measures nothing worth quoting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.engines import cores
from benchmarks.record import Record, deliver, say
from serving_plugin.bench.report import write_atomically
from serving_plugin.control import checks
from serving_plugin.control.launcher import Device
from serving_plugin.engine import profile_figures
from serving_plugin.engine.profile import Profile, ProfilePlan, Samples, measure, plan_profile, summarise

MAX_TOKENS, MAX_BATCH, MAX_MODEL_LEN_TOKENS = 2048, 64, 4096
NUM_ROUNDS = 5
PAPER_TOKENS = 512  # OPT-13B on a V100


__all__ = ["deliver", "draw", "run"]


@dataclass(slots=True, kw_only=True)
class SaturationResult(Record):
    """Every step measured, and what follows from it: over all rounds, and in each alone."""

    model: str
    plan: dict[str, Any]
    samples: Samples
    profile: dict[str, Any]
    saturation_tokens_by_round: list[int]
    plateau_tokens_per_s_by_round: list[float]

    @property
    def is_complete(self) -> bool:
        """Whether every round measured both phases."""
        rounds = range(self.plan["num_rounds"])
        return all(s.prefill and s.decode for s in map(self.samples.of_round, rounds))

    @property
    def found(self) -> Profile:
        """What follows from all rounds."""
        return summarise(self.samples, self.plan["block_size_tokens"])

    def tables(self) -> Iterator[Table]:
        """Both curves, the saturation points and the cost model."""
        yield from profile_figures.tables(self.found)
        table = Table(title=f"Saturation (the paper: {PAPER_TOKENS} tokens, OPT-13B on a V100)", show_header=False)
        table.add_row("by round, tokens", ", ".join(map(str, self.saturation_tokens_by_round)))
        table.add_row("plateau by round, tokens/s", ", ".join(f"{x:.0f}" for x in self.plateau_tokens_per_s_by_round))
        for sentence in profile_figures.sentences(self.found):
            table.add_row("all rounds", sentence)
        yield table


def run(model: Path, is_short: bool) -> SaturationResult:
    """Measure on this machine: on CPU one core, as an instance of `tetri serve` has here."""
    is_cuda = checks.detect_device() is Device.CUDA
    checks.check_model(str(model.absolute()))  # refuses a missing folder before anything is loaded
    plan = plan_profile(
        MAX_TOKENS,
        MAX_BATCH,
        checks.max_model_len(str(model), MAX_MODEL_LEN_TOKENS),
        num_rounds=NUM_ROUNDS,
        is_short=is_short,
    )
    samples = measure(str(model), plan, None if is_cuda else cores()[0], "auto", is_cuda, say)
    return result_of(model.name, plan, samples)


def result_of(model: str, plan: ProfilePlan, samples: Samples) -> SaturationResult:
    """The record of what was measured."""
    rounds = [summarise(samples.of_round(i), plan.block_size_tokens) for i in range(plan.num_rounds)]
    found = summarise(samples, plan.block_size_tokens)
    return SaturationResult(
        model=model,
        plan=asdict(plan),
        samples=samples,
        profile={
            "plateau_tokens_per_s": found.plateau_tokens_per_s,
            "saturation_tokens": found.saturation_tokens,
            "chunk_tokens": found.chunk_tokens,
            "has_levelled_off": found.has_levelled_off,
            "spread": found.spread,
            "prefill_fit": asdict(found.prefill_fit),
            "decode_fit": asdict(found.decode_fit),
        },
        saturation_tokens_by_round=[one.saturation_tokens for one in rounds],
        plateau_tokens_per_s_by_round=[one.plateau_tokens_per_s for one in rounds],
    )


def draw(result: SaturationResult, path: Path) -> None:
    """Figure 2 of this machine."""
    title = f"{result.model}, {result.samples.engine['dtype']}"
    write_atomically(path, profile_figures.picture(result.found, path.suffix, title))
