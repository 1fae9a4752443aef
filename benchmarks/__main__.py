"""`python -m benchmarks --list`, `python -m benchmarks NAME [--short] [--json FILE] [--plot FILE] [--report FILE]`."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from serving_plugin.core.errors import ConfigurationError, TetriError

# Modules of this package, imported when asked for: `--list` must not load what a benchmark needs.
BENCHMARKS: dict[str, str] = {
    "serve": "the paper's five workloads on TetriServe and plain vLLM (figures 11-15)",
    "saturation": "prefill and decode time by tokens, batch and context: where they saturate (figure 2)",
    "interference": "prefill and decode requests beside each other, together and apart (figures 3-5)",
    "prefill_order": "chunked FCFS, SJF and LJF against a fixed batch of 16 (figure 16)",
    "predictor": "what a length forecast costs, alone and beside a prefill instance (figure 17)",
    "admission": "admission policies with little KV memory, by where their ranges come from (figure 18)",
    "dispatch": "dispatch policies over 2 and 3 decode instances (figure 19)",
    "backpressure": "a full decode instance: vetoes, pinned KV, 429, recovery",
    "overhead": "what our scheduler adds to a step, against vLLM's own",
    "refresh": "what the first output tokens tell of a reply's length, offline",
    "losses": "what each option of the predictor's training adds, on the validation split",
    "transfer": "a predictor used for another model's replies than it was trained on, both ways",
    "backbones": "what a forecast costs by the size of the backbone",
}

# What a benchmark reads are the arguments of its `run`.
DEFAULTS: dict[str, Any] = {"model": Path("models/targets/SmolLM2-135M-Instruct"), "source": "sharegpt"}

app = typer.Typer(add_completion=False, help="Experiments against peers; results name the command that made them.")


@app.command()
def main(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; see --list.")] = None,
    list_names: Annotated[bool, typer.Option("--list", help="Print the names and what they measure.")] = False,
    short: Annotated[bool, typer.Option("--short", help="Minutes, not hours: shows that it works.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every raw figure here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures here (.png or .svg).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    model: Annotated[Path | None, typer.Option(help=f"Target model folder; default: {DEFAULTS['model']}.")] = None,
    source: Annotated[str | None, typer.Option(help="Prompts: `sharegpt` (the default) or a file.")] = None,
) -> None:
    """Run one benchmark on this machine."""
    if list_names:
        for known, summary in BENCHMARKS.items():
            typer.echo(f"{known:14} {summary}")
        return
    if name not in BENCHMARKS:
        what = "no benchmark named" if name is None else f"unknown benchmark {name!r}"
        raise ConfigurationError(f"{what}; known are {', '.join(BENCHMARKS)}")
    from serving_plugin.bench.console import require_writable
    from serving_plugin.engine.profile_figures import require_drawable

    require_writable(json_path, report, plot)
    require_drawable(plot)
    benchmark = import_module(f"benchmarks.{name}")
    given = {option: value for option, value in (("model", model), ("source", source)) if value is not None}
    read = inspect.signature(benchmark.run).parameters
    for option in given:
        if option not in read:
            raise ConfigurationError(f"--{option} is nothing that {name} reads; leave it out")
    options = {option: value for option, value in (DEFAULTS | given).items() if option in read}
    if plot is not None and not hasattr(benchmark, "draw"):
        raise ConfigurationError(f"{name} draws nothing; leave --plot out")
    result = benchmark.run(**options, is_short=short)
    is_complete = benchmark.deliver(result, json_path, report)
    if plot is not None:  # after the figures are safe
        benchmark.draw(result, plot)
    if not is_complete:
        raise typer.Exit(1)


def entry() -> None:
    """Run the command line; a `TetriError` becomes one line on stderr and exit code 2."""
    try:
        app(prog_name="python -m benchmarks")
    except TetriError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    entry()
