"""`tetri profile`: where prefill saturates on this machine, and what a step costs; the work is in `engine.profile`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from serving_plugin.core.errors import ConfigurationError

if TYPE_CHECKING:
    from serving_plugin.engine.profile import Profile, Samples
    from serving_plugin.simulator.cost_model import MeasuredCostModel

DTYPES = ("auto", "bfloat16", "float16", "float32")


def register(app: typer.Typer) -> None:
    """Add `profile` to `app`."""
    app.command("profile")(profile)


def profile(
    model: Annotated[str, typer.Argument(help="Model folder or Hugging Face name.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Chunk size and cost model as JSON.")] = Path("profile.json"),
    plot: Annotated[Path | None, typer.Option(help="Draw the curves here (.png or .svg).")] = None,
    core: Annotated[
        int | None, typer.Option(min=0, help="Core of the engine, as an instance would have it; default: all cores.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Longest prompt that is prefilled in one step.")] = 2048,
    max_batch: Annotated[int | None, typer.Option(help="Largest decode batch. Default: 64 on CPU, 256 on GPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of tables.")] = False,
    short: Annotated[bool, typer.Option("--short", help="One round of few points: shows that it works.")] = False,
) -> None:
    """Measure MODEL on this machine: prefill time by tokens, decode time by batch and context.

    Finds the saturation point, which is the chunk size to serve with, and a cost model for simulations. Stop other
    work on the machine first; on two cores a 135M model takes about ten minutes.

    Examples:

        tetri profile models/targets/SmolLM2-135M-Instruct --core 0 --plot profile.png

        tetri profile MODEL --max-tokens 1024 --max-batch 16 --out profiles/small.json
    """
    from rich.console import Console

    from serving_plugin.bench.console import require_writable
    from serving_plugin.bench.report import write_atomically
    from serving_plugin.control import checks
    from serving_plugin.control.launcher import Device
    from serving_plugin.engine import profile_figures as figures
    from serving_plugin.engine.offline_process import OfflineEngineError
    from serving_plugin.engine.profile import DECODE_CONTEXTS_TOKENS, GROWTH_TOKENS, measure, plan_profile, summarise

    require_writable(out, plot)
    figures.require_drawable(plot)
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype {dtype!r} is unknown; known are {', '.join(DTYPES)}")
    _check_core(core)
    if not checks.check_model(model):
        checks.check_hub_model(model)
    is_cuda = checks.detect_device() is Device.CUDA
    plan = plan_profile(
        max_tokens,
        max_batch if max_batch is not None else 256 if is_cuda else 64,
        checks.max_model_len(model, max(max_tokens, *DECODE_CONTEXTS_TOKENS) + GROWTH_TOKENS),
        max_sum_context_tokens=131_072 if is_cuda else 16_384,
        is_short=short,
    )
    try:
        samples = measure(model, plan, core, dtype, is_cuda, lambda line: print(line, file=sys.stderr, flush=True))
    except OfflineEngineError as error:  # vLLM's own texts have many lines
        raise OfflineEngineError(" ".join(str(error).split())) from None
    found = summarise(samples, plan.block_size_tokens)
    cost_model = cost_model_of(model, core, samples, found, plan.block_size_tokens)
    text = json.dumps(cost_model.to_json(), indent=2, allow_nan=False)
    write_atomically(out, text + "\n")
    print(f"cost model: {out}", file=sys.stderr)
    if plot is not None:
        title = f"{Path(model).name}, {cost_model.dtype}, {cost_model.machine['processor']}"
        write_atomically(plot, figures.picture(found, plot.suffix, title))
        print(f"curves: {plot}", file=sys.stderr)
    if as_json:
        typer.echo(text)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in figures.tables(found):
        console.print(table)
    for line in figures.sentences(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def cost_model_of(
    model: str, core: int | None, samples: Samples, found: Profile, block_size_tokens: int
) -> MeasuredCostModel:
    """What is written down: the fits, the raw points, and what they were measured on."""
    from serving_plugin.bench.compare import machine_facts, version_facts
    from serving_plugin.engine.profile import Fit, by_batch, by_tokens
    from serving_plugin.simulator.cost_model import Coefficients, DecodePoint, MeasuredCostModel, PrefillPoint

    def coefficients(fit: Fit) -> Coefficients:
        return Coefficients(fit.coefficients, fit.median_error, fit.max_error)

    return MeasuredCostModel(
        model=model,
        dtype=samples.engine["dtype"],
        device=samples.engine["device"],
        num_cores=1 if core is not None else len(_cores()),
        measured=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        machine={**machine_facts(), "device_name": samples.engine["device_name"]},
        versions=version_facts(),
        block_size_tokens=block_size_tokens,
        plateau_tokens_per_s=found.plateau_tokens_per_s,
        saturation_tokens=found.saturation_tokens,
        chunk_tokens=found.chunk_tokens,
        prefill=coefficients(found.prefill_fit),
        decode=coefficients(found.decode_fit),
        prefill_points=tuple(PrefillPoint(size, tuple(steps)) for size, steps in by_tokens(samples).items()),
        decode_points=tuple(
            DecodePoint(*key, median(one.sum_context_tokens for one in steps), tuple(one.step_ms for one in steps))
            for key, steps in by_batch(samples).items()
        ),
    )


def _check_core(core: int | None) -> None:
    if core is not None and core not in _cores():
        known = ", ".join(map(str, _cores()))
        raise ConfigurationError(f"--core {core} is none that this process may use; those are {known}")


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
