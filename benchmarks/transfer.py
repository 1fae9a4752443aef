"""`transfer`: a predictor used for another model's replies than it was trained on, both ways.

The same turns twice: with the data set's own replies (recorded) and with the target's (generated), counted in the
target's tokens and censored at the same limit, so that only the author of the replies differs. One predictor is trained
on each, on as many rows; both forecast both kinds of test replies. `marginal` is the test source's own training
distribution: what a history of lengths would know. Differences are paired by conversation.

Needs data/prepared and the target of the active profile. Replies are kept in data/transfer: a run that was stopped goes
on. `--short` shows that it works.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.record import Record, deliver, say
from pipeline.files import read_json_lines, write_json_lines
from pipeline.generate import REPLIES_FILE, choose_prompts, fingerprint, generate
from pipeline.label import count_tokens, generated_replies, recorded_replies
from pipeline.params import Params, load_params
from pipeline.prepare import PREPARED_FOLDER
from pipeline.target import load_tokenizer
from pipeline.train import choose_rows, edges_up_to, fine_buckets, fit
from serving_plugin.predictor.evaluation import resampled
from serving_plugin.predictor.evaluation.bootstrap import paired_gain
from serving_plugin.predictor.evaluation.resampled import Resamples
from serving_plugin.predictor.evaluation.scores import Forecasts, Truth, row_scores, share_covered
from serving_plugin.predictor.rows import LabelledRow, read_rows

FOLDER = Path("data/transfer")
SOURCES = ("recorded", "generated")
WIDTH_TOKENS = 100  # of the buckets whose accuracy is shown; the target's replies rarely pass 200
HEAVY_OVER_TOKENS = 128
COVERAGE = 0.9
NUM_RESAMPLES = 1000


__all__ = ["deliver", "run"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How many turns are answered, and how long the target may answer."""

    num_train_prompts: int = 1400
    num_test_prompts: int = 500
    max_tokens: int = 256
    epochs: float = 2.0


SHORT = Extent(num_train_prompts=40, num_test_prompts=20, max_tokens=64, epochs=1.0)


@dataclass(slots=True, kw_only=True)
class TransferResult(Record):
    """Scores by training source and test source; lengths in tokens."""

    extent: dict[str, Any]
    params: dict[str, Any]
    sources: dict[str, Any] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every pair of sources was measured."""
        return len(self.cells) == (len(SOURCES) + 1) * len(SOURCES)

    def tables(self) -> Iterator[Table]:
        """One table for the console."""
        table = Table(title=f"Predictors on replies of another author, limit {self.extent['max_tokens']} tokens")
        columns = ("trained on", "tested on", f"accuracy at {WIDTH_TOKENS}", "to own source", "tau", "AUROC", "CRPS")
        for column in columns:
            table.add_column(column, justify="left" if "on" in column.split() else "right")
        for cell in self.cells:
            difference = cell.get("accuracy_difference")
            table.add_row(
                cell["trained_on"],
                cell["tested_on"],
                f"{cell['accuracy']:.1%}",
                "" if difference is None else _bounds(difference, 100),
                _bounds(cell["kendall_tau"]),
                _bounds(cell["auroc_heavy"]),
                f"{cell['crps_tokens']:.1f}",
            )
        yield table


def _bounds(found: dict[str, float | None], scale: float = 1.0) -> str:
    numbers = [scale * number for number in (found["value"], found["low"], found["high"]) if number is not None]
    return "{:.3g} [{:.3g}, {:.3g}]".format(*numbers) if len(numbers) == len(found) else "-"


def run(is_short: bool) -> TransferResult:
    """Answer, train twice, score all pairs on this machine."""
    extent = SHORT if is_short else Extent()
    params = _settings(load_params(), extent)
    # vLLM changes the process that it runs in (threads, dtype); what is trained here shall not depend on that
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(answer, params, extent).result()
    rows = {split: _both_sources(params, split) for split in ("train", "test")}
    result = TransferResult(
        extent=asdict(extent),
        params={name: params.to_plain()[name] for name in ("generate", "label", "input", "train")},
    )
    edges = edges_up_to(params.label.max_length_tokens, params.train.fine_granularity_tokens)
    truth = {tested_on: Truth.of(rows["test"][tested_on]) for tested_on in SOURCES}
    forecasts: dict[tuple[str, str], Forecasts] = {}
    for trained_on in SOURCES:
        train_rows = rows["train"][trained_on]
        result.sources[trained_on] = {split: _describe(held[trained_on]) for split, held in rows.items()}
        say(f"training on {len(train_rows)} {trained_on} replies")
        held_out = choose_rows(train_rows, params.seed, max_rows=max(1, len(train_rows) // 10))
        kept = [row for row in train_rows if row.root_id not in {one.root_id for one in held_out}]
        with tempfile.TemporaryDirectory(prefix="tetri-transfer-") as scratch:
            fitted = fit(params, kept, held_out, Path(scratch))
        counts = np.bincount(fine_buckets([row.output_tokens for row in kept], edges), minlength=len(edges) - 1)
        for tested_on in SOURCES:
            test_rows, came = rows["test"][tested_on], truth[tested_on]
            forecasts[trained_on, tested_on] = came.forecasts(edges, fitted.probabilities(test_rows))
            if trained_on == tested_on:
                forecasts["marginal", tested_on] = came.forecasts(edges, np.tile(counts, (len(test_rows), 1)))
    for tested_on in SOURCES:
        for trained_on in (*SOURCES, "marginal"):
            own = None if trained_on == tested_on else forecasts[tested_on, tested_on]
            figures = score(forecasts[trained_on, tested_on], own, truth[tested_on])
            result.cells.append({"trained_on": trained_on, "tested_on": tested_on, **figures})
    return result


def _settings(params: Params, extent: Extent) -> Params:
    """The active profile with one limit for both sources; the largest forecast is of that limit, too."""
    generated = replace(params.generate, max_tokens=extent.max_tokens, turns="all", num_resampled=0, samples=1)
    return replace(
        params,
        generate=generated,
        label=replace(params.label, max_length_tokens=extent.max_tokens),
        train=replace(params.train, epochs=extent.epochs, max_train_rows=None),
    )


def answer(params: Params, extent: Extent) -> None:
    """Let the target answer the chosen turns of both splits; replies that are there already are kept."""
    prompts = [
        prompt
        for split, number in (("train", extent.num_train_prompts), ("test", extent.num_test_prompts))
        for prompt in choose_prompts(
            PREPARED_FOLDER, replace(params.generate, splits=(split,), num_prompts=number), params.seed
        )
    ]
    generate(prompts, fingerprint(params.target, params.generate, params.seed), params.generate, FOLDER, None)


def _both_sources(params: Params, split: str) -> dict[str, list[LabelledRow]]:
    """The turns of a split that the target answered, with its replies and with the recorded ones."""
    chats = list(read_json_lines(PREPARED_FOLDER / f"{split}.jsonl", "prepare"))
    cap = params.label.max_length_tokens
    answered = [
        row for row in read_json_lines(FOLDER / REPLIES_FILE, "generate")
        if row["split"] == split and row["output_tokens"] > 0
    ]  # fmt: skip
    turns: dict[str, list[int]] = {}
    for row in answered:
        turns.setdefault(row["root_id"], []).append(row["turn"])
    chosen = [{**chat, "replies": sorted(turns[chat["root_id"]])} for chat in chats if chat["root_id"] in turns]
    count = count_tokens(load_tokenizer(params.target.location))
    lines = {
        "recorded": recorded_replies(iter(chosen), count, cap),
        "generated": generated_replies({chat["root_id"]: chat["messages"] for chat in chosen}, iter(answered), cap),
    }
    found = {}
    for source, labelled in lines.items():
        path = FOLDER / source / f"{split}.jsonl"
        write_json_lines(path, labelled)
        found[source] = sorted(read_rows(path), key=lambda row: row.id)
    return found


def score(forecasts: Forecasts, own: Forecasts | None, truth: Truth) -> dict[str, Any]:
    """Figures with 95 % bounds (None where undefined); both forecasts are of `truth.forecasts`.

    `own` is that of the predictor trained on the tested source.
    """
    lengths, drawn = truth.lengths_tokens, Resamples(truth.roots, NUM_RESAMPLES, 0)
    by_row, key = row_scores(forecasts, lengths, (WIDTH_TOKENS,), COVERAGE), f"accuracy_{WIDTH_TOKENS}"
    tau = resampled.kendall_tau(drawn, forecasts.means(), lengths)
    auroc = resampled.auroc(drawn, forecasts.probability_over(HEAVY_OVER_TOKENS), lengths > HEAVY_OVER_TOKENS)
    figures: dict[str, Any] = {
        "num_rows": len(lengths),
        "accuracy": float(by_row[key].mean()),
        "crps_tokens": float(by_row["crps_tokens"].mean()),
        "coverage": share_covered(lengths, forecasts.quantiles(COVERAGE), truth.cap_tokens),
        "kendall_tau": resampled.interval(tau).to_plain(),
        "auroc_heavy": resampled.interval(auroc).to_plain(),
    }
    if own is not None:
        other = row_scores(own, lengths, (WIDTH_TOKENS,), COVERAGE)
        for name, column in (("accuracy", key), ("crps_tokens", "crps_tokens")):
            gain = paired_gain(by_row[column], other[column], truth.roots, NUM_RESAMPLES, 0)
            figures[f"{name}_difference"] = gain.to_plain()
    return figures


def _describe(rows: Sequence[LabelledRow]) -> dict[str, Any]:
    lengths = np.asarray([row.output_tokens for row in rows])
    return {
        "num_rows": len(rows),
        "num_censored": sum(row.censored for row in rows),
        "median_tokens": float(np.median(lengths)),
        "mean_tokens": round(float(lengths.mean()), 1),
    }
