"""`tetri bench`: measure a running server, or compare TetriServe with plain vLLM on the same hardware."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from serving_plugin.core.errors import ConfigurationError

_Choice = TypeVar("_Choice", bound=StrEnum)

_EPILOG = """
Examples:

  tetri bench --model MODEL --base-url http://127.0.0.1:8000 --rate 1.6

  tetri bench --model MODEL --compare --workload mixed --num-requests 64 --rate 1.2 --report reports/bench.html

  tetri bench --model MODEL --compare --systems tetriserve,coupled --tune 64,128,256 --seeds 0,1,2 --json out.json
"""

_SERVER, _WORK, _COMPARE, _OUT = "Servers", "Workload", "Comparison", "Output"


def register(app: typer.Typer) -> None:
    """Add `bench` to `app`."""
    app.command("bench", epilog=_EPILOG)(bench)


def bench(
    model: Annotated[Path, typer.Option(help="Model folder: its tokenizer counts lengths.", rich_help_panel=_WORK)],
    workload: Annotated[
        str, typer.Option(help="lpld, lphd, hpld, hphd, mixed; several with commas.", rich_help_panel=_WORK)
    ] = "mixed",
    num_requests: Annotated[int, typer.Option(help="Requests per repetition.", rich_help_panel=_WORK)] = 64,
    rate: Annotated[
        float | None, typer.Option(help="Poisson arrivals per second; without it all at once.", rich_help_panel=_WORK)
    ] = None,
    seeds: Annotated[str, typer.Option(help="One repetition per seed.", rich_help_panel=_WORK)] = "0",
    source: Annotated[
        str,
        typer.Option(
            help="Prompts: `sharegpt` (the package), a ShareGPT file or URL, or prepared JSON lines.",
            rich_help_panel=_WORK,
        ),
    ] = "sharegpt",
    length_source: Annotated[
        str, typer.Option(help="Lengths: `sharegpt` (recorded) or `paper` (figure 1, scaled).", rich_help_panel=_WORK)
    ] = "sharegpt",
    lengths: Annotated[
        str, typer.Option(help="`fixed`: exactly these outputs; `natural`: the model ends.", rich_help_panel=_WORK)
    ] = "fixed",
    max_output_tokens: Annotated[
        int, typer.Option(help="Longest output; cuts recorded ones.", rich_help_panel=_WORK)
    ] = 256,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt; the rest of the context if left out.", rich_help_panel=_WORK)
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Factor on the 512/128 thresholds; follows the context if left out.", rich_help_panel=_WORK),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context in tokens; the model's own, at most 2048.", rich_help_panel=_WORK)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", rich_help_panel=_WORK)] = 0.0,
    base_url: Annotated[
        list[str] | None,
        typer.Option(help="A running server; several are used round robin.", rich_help_panel=_SERVER),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Model name in requests; asked of the server if left out.", rich_help_panel=_SERVER),
    ] = None,
    request_timeout_s: Annotated[float, typer.Option(help="Bound on one request.", rich_help_panel=_SERVER)] = 600.0,
    warm_up: Annotated[int, typer.Option(help="Unmeasured requests per server first.", rich_help_panel=_SERVER)] = 4,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Start the systems one after another and compare.", rich_help_panel=_COMPARE),
    ] = False,
    systems: Annotated[
        str | None,
        typer.Option(
            help="tetriserve, coupled, single, coupled-untuned, single-untuned. Default: the first three.",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="Also servers with vLLM's default chunk.", rich_help_panel=_COMPARE)
    ] = False,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(help="Chunk size of plain vLLM; default 128 on CPU, 512 on GPU.", rich_help_panel=_COMPARE),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            help="Chunk sizes to try on the coupled servers first, such as 64,128,256.", rich_help_panel=_COMPARE
        ),
    ] = None,
    prefill: Annotated[int, typer.Option(help="Prefill instances of TetriServe.", rich_help_panel=_COMPARE)] = 1,
    decode: Annotated[int, typer.Option(help="Decode instances of TetriServe.", rich_help_panel=_COMPARE)] = 1,
    port: Annotated[
        int | None, typer.Option(help="First port of the started servers; else any.", rich_help_panel=_COMPARE)
    ] = None,
    kv_cache_gib: Annotated[int, typer.Option(help="KV cache of each CPU server, GiB.", rich_help_panel=_COMPARE)] = 2,
    dtype: Annotated[
        str | None, typer.Option(help="Of all servers; the model's own if left out.", rich_help_panel=_COMPARE)
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs per server.", rich_help_panel=_COMPARE)] = 1,
    serve_args: Annotated[str, typer.Option(help="More flags for `tetri serve`.", rich_help_panel=_COMPARE)] = "",
    vllm_args: Annotated[str, typer.Option(help="More vLLM flags for all servers.", rich_help_panel=_COMPARE)] = "",
    log_folder: Annotated[Path, typer.Option(help="Logs of the servers.", rich_help_panel=_COMPARE)] = Path(
        "logs/bench"
    ),
    ready_timeout_s: Annotated[
        float, typer.Option(help="Bound on a system's start.", rich_help_panel=_COMPARE)
    ] = 600.0,
    slo_ttft_s: Annotated[float | None, typer.Option(help="TTFT of a good request.", rich_help_panel=_OUT)] = None,
    slo_tpot_s: Annotated[float | None, typer.Option(help="TPOT of a good request.", rich_help_panel=_OUT)] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every raw figure here.", rich_help_panel=_OUT)
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.", rich_help_panel=_OUT)] = None,
) -> None:
    """Replay real prompts and measure TTFT, ITL, JCT, resource time and perf/$.

    Measures the servers at --base-url, or with --compare starts TetriServe and plain vLLM in turn on this machine.
    """
    from serving_plugin.bench.compare import MeasureOptions
    from serving_plugin.bench.console import ConsoleWatcher, deliver, require_writable
    from serving_plugin.bench.loadgen import Lengths
    from serving_plugin.bench.metrics import Slo
    from serving_plugin.bench.session import (
        Comparison,
        ServerTarget,
        WorkloadOptions,
        bench_compared,
        bench_running,
        default_context_tokens,
        draw_workloads,
        resolved,
    )
    from serving_plugin.bench.systems import (
        SystemSettings,
        default_chunk_tokens,
        detect_hardware,
        parse_system_name,
        plan_system,
        ports_of,
    )
    from serving_plugin.bench.workloads import LengthSource, parse_workload_name

    require_writable(json_path, report)
    if compare == bool(base_url):
        raise ConfigurationError("give either --base-url of a running server or --compare")
    work = WorkloadOptions(
        names=tuple(parse_workload_name(name) for name in split_list(workload)),
        seeds=parse_ints(seeds, "--seeds"),
        num_requests=num_requests,
        rate_per_s=rate,
        source=source,
        length_source=one_of(LengthSource, length_source, "--length-source"),
        max_output_tokens=max_output_tokens,
        max_prompt_tokens=max_prompt_tokens,
        scale=scale,
    )
    slo = Slo(slo_ttft_s, slo_tpot_s) if slo_ttft_s is not None or slo_tpot_s is not None else None
    options = MeasureOptions(
        one_of(Lengths, lengths, "--lengths"), max_output_tokens, temperature, request_timeout_s, slo, warm_up
    )
    context_tokens = max_model_len or default_context_tokens(model)
    if not compare:
        target = resolved(ServerTarget(tuple(base_url or ()), served_model_name))  # refuses it before the data is read
        with ConsoleWatcher() as watcher:
            workloads = draw_workloads(work, model, context_tokens, watcher)
            result = bench_running(target, workloads, options, model, watcher)
    else:
        hardware = detect_hardware()
        settings = SystemSettings(
            model=model,
            hardware=hardware,
            max_model_len_tokens=context_tokens,
            num_prefill=prefill,
            num_decode=decode,
            chunk_tokens=chunk_tokens or default_chunk_tokens(hardware),
            prefill_chunk_tokens=default_chunk_tokens(hardware),
            kv_cache_gib=kv_cache_gib,
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            extra_serve_args=tuple(shlex.split(serve_args)),
            extra_vllm_args=tuple(shlex.split(vllm_args)),
            log_folder=log_folder,
            ready_timeout_s=ready_timeout_s,
            first_port=port,
        )
        names = split_list(systems) if systems else ["tetriserve", "coupled", "single"]
        names += [name for name in ("coupled-untuned", "single-untuned") if untuned and name not in names]
        comparison = Comparison(
            tuple(parse_system_name(name) for name in names), parse_ints(tune, "--tune") if tune else ()
        )
        ports = ports_of(settings)  # refuses a taken port, and the plans a missing command, before the data is read
        for name in comparison.systems:
            plan_system(name, settings, ports)
        with ConsoleWatcher() as watcher:
            workloads = draw_workloads(work, model, context_tokens, watcher)
            result = bench_compared(comparison, workloads, settings, options, watcher)
    if not deliver(result, json_path, report):
        raise typer.Exit(1)


def split_list(text: str) -> list[str]:
    """Items of a comma-separated list, blanks dropped."""
    return [item.strip() for item in text.split(",") if item.strip()]


def parse_ints(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers of a comma-separated list. Raises `ConfigurationError` naming `flag`."""
    try:
        return tuple(int(item) for item in split_list(text))
    except ValueError:
        raise ConfigurationError(f"{flag} {text!r} is not a list of whole numbers, such as 0,1,2") from None


def one_of(kind: type[_Choice], text: str, flag: str) -> _Choice:
    """The member of `kind` named `text`. Raises `ConfigurationError` that lists the known ones."""
    try:
        return kind(text.strip().lower())
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise ConfigurationError(f"{flag} {text!r} is unknown; known are {known}") from None
