"""From options to processes: vLLM's command line of one instance, and a gateway with its instances on one machine.

`build_instance_command` is pure. `run_cluster` starts, watches and stops; nobody outlives it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from serving_plugin.control.settings import GatewaySettings
from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.errors import ConfigurationError, LostInstanceError
from serving_plugin.core.types import Role
from serving_plugin.processes import Child, ChildSpec, stop_all, wait_until_ready
from serving_plugin.wire import KV_CONNECTOR, SCHEDULER_FACTORY

logger = logging.getLogger(__name__)

SIDE_CHANNEL_PORT_OFFSET = 10_000
MAX_PORT = 65_535
STOP_GRACE_S = 20.0
_WATCH_INTERVAL_S = 0.3

# Set by tetri; a second value would silently lose against the first.
_OWN_FLAGS = (
    "kv-transfer-config",
    "scheduler-cls",
    "host",
    "port",
    "served-model-name",
    "tensor-parallel-size",
    "data-parallel-size",  # one agent speaks for one engine
    "api-server-count",
)
_SHORT_FLAGS = {"-tp": "tensor-parallel-size", "-q": "quantization", "-dp": "data-parallel-size"}


class Device(StrEnum):
    """What vLLM computes on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """All that one instance's command line depends on. `cores` pin a CPU instance, `devices` are a GPU instance's.

    `plugins` are other vLLM plugins to allow beside ours (`VLLM_PLUGINS` is an allow-list).
    """

    model: str
    settings: InstanceSettings
    device: Device
    host: str
    port: int
    served_model_name: str | None = None
    tensor_parallel_size: int = 1
    kv_cache_gib: int = 1
    max_model_len: int = 2048
    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    is_local_model: bool = False
    plugins: tuple[str, ...] = ()
    vllm_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.port <= MAX_PORT:
            raise ConfigurationError(f"port {self.port} of {self.settings.instance_id} is outside 1-{MAX_PORT}")

    @property
    def side_channel_port(self) -> int:
        """Where NIXL's handshakes are answered; another one per instance."""
        above = self.port + SIDE_CHANNEL_PORT_OFFSET
        return above if above <= MAX_PORT else self.port - SIDE_CHANNEL_PORT_OFFSET


def build_instance_command(plan: InstancePlan) -> tuple[dict[str, str], list[str]]:
    """Environment additions and argument list of the canonical `vllm serve` line; the user's flags win over defaults.

    Raises:
        ConfigurationError: a vLLM flag that tetri sets itself, or a stray word among the flags.
    """
    given = _flag_names(plan.vllm_flags)
    for name in _OWN_FLAGS:
        if name in given:
            raise ConfigurationError(f"--{name} is set by tetri: use tetri's own options instead")
    environment = {
        "VLLM_PLUGINS": ",".join(("tetri", *(p for p in plan.plugins if p != "tetri"))),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(plan.side_channel_port),
        "VLLM_NO_USAGE_STATS": "1",
    }
    host = urlsplit(plan.settings.url).hostname or ""
    if host not in ("127.0.0.1", "localhost", "::1"):  # peers on other hosts must reach NIXL's handshake
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
    if plan.is_local_model:
        environment["HF_HUB_OFFLINE"] = "1"
    if plan.device is Device.CPU:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(plan.kv_cache_gib)
        if plan.cores:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, plan.cores))
    elif plan.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices)
    argv = ["vllm", "serve", plan.model, "--scheduler-cls", SCHEDULER_FACTORY]
    argv += ["--kv-transfer-config", json.dumps(_kv_transfer_config(plan))]
    argv += ["--host", plan.host, "--port", str(plan.port)]
    if plan.served_model_name is not None:
        argv += ["--served-model-name", plan.served_model_name]
    if plan.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(plan.tensor_parallel_size)]
    for flag, *values in _default_flags(plan):
        if _plain_name(flag) not in given:
            argv += [flag, *values]
    return environment, [*argv, *plan.vllm_flags]


def _kv_transfer_config(plan: InstancePlan) -> dict[str, object]:
    config: dict[str, object] = dict(KV_CONNECTOR)
    if plan.device is Device.CPU:
        config["kv_buffer_device"] = "cpu"
    config["kv_connector_extra_config"] = plan.settings.to_dict()
    return config


def _default_flags(plan: InstancePlan) -> list[tuple[str, ...]]:
    """Ours unless the user says otherwise. On a CPU: eager (compiling takes minutes), whole blocks, no prefix cache."""
    if plan.device is Device.CUDA:
        return []
    return [
        ("--enforce-eager",),
        ("--block-size", "32"),
        ("--no-enable-prefix-caching",),
        ("--max-num-seqs", "64"),
        ("--max-model-len", str(plan.max_model_len)),
    ]


def _flag_names(flags: Sequence[str]) -> set[str]:
    """Plain names of the flags in a list of words; values are skipped."""
    if flags and not flags[0].startswith("-"):
        raise ConfigurationError(f"{flags[0]!r} is not a vLLM flag: flags start with --")
    return {_plain_name(word) for word in flags if word.startswith("--") or word.split("=")[0] in _SHORT_FLAGS}


def _plain_name(flag: str) -> str:
    name = flag.split("=", 1)[0]
    name = _SHORT_FLAGS.get(name, name).lstrip("-").replace("_", "-")
    return name.removeprefix("no-")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A gateway and its instances."""

    gateway: GatewaySettings
    instances: tuple[InstancePlan, ...]
    log_dir: Path
    ready_timeout_s: float = 300.0

    @property
    def url(self) -> str:
        """Where clients reach the gateway."""
        return base_url(self.gateway.host, self.gateway.port)


def base_url(host: str, port: int) -> str:
    """URL of a server on this machine; a wildcard address is reached over loopback."""
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{port}"


def cluster_specs(plan: ClusterPlan, vllm: str = "vllm") -> dict[str, ChildSpec]:
    """Children by the URL that answers 200 once they are ready; `vllm` is the executable."""
    settings = json.dumps(dataclasses.asdict(plan.gateway))
    specs = {
        f"{plan.url}/health": ChildSpec(
            "gateway",
            (sys.executable, "-m", "serving_plugin.control.gateway", "--settings", settings),
            plan.log_dir / "gateway.log",
            {},
        )
    }
    for instance in plan.instances:
        environment, argv = build_instance_command(instance)
        name = instance.settings.instance_id
        specs[f"{instance.settings.url}/health"] = ChildSpec(
            name,
            (vllm, *argv[1:]),
            plan.log_dir / f"{name}.log",
            environment,
            instance.cores,
        )
    return specs


def run_cluster(
    specs: Mapping[str, ChildSpec],
    ready_timeout_s: float,
    on_progress: Callable[[set[str], float], None],
    on_ready: Callable[[], None],
    on_failure: Callable[[str], None],
) -> int:
    """Start all children, wait until ready, watch until a signal or a death, stop all. Returns the exit code.

    0 after SIGINT or SIGTERM, 1 when a child died (`on_failure` gets its name and the end of its log).

    Raises:
        ConfigurationError: not ready in time.
    """
    children: dict[str, Child] = {}
    with stop_signals() as stop:
        try:
            for url, spec in specs.items():
                _set_old_log_aside(spec.log_path)
                children[url] = Child(spec)
            wait_until_ready(children, ready_timeout_s, on_progress, stop.is_set)
            if not stop.is_set():
                on_ready()
            while not stop.wait(_WATCH_INTERVAL_S):
                _raise_if_dead(children.values())
            return 0
        except LostInstanceError as error:
            on_failure(str(error))
            return 1
        finally:
            stop_all(list(children.values()), STOP_GRACE_S)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; the old handlers come back afterwards."""
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    old = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _raise_if_dead(children: Iterable[Child]) -> None:
    for child in children:
        code = child.exit_code()
        if code is not None:
            raise LostInstanceError(
                f"{child.spec.name} ended with code {code}; log {child.spec.log_path}:\n{child.log_tail()}"
            )


def _set_old_log_aside(path: Path) -> None:
    """A log holds one run; the one before is kept beside it."""
    if path.exists():
        path.replace(path.with_name(f"{path.name}.previous"))


def roles(num_prefill: int, num_decode: int) -> list[tuple[Role, str]]:
    """Role and id of each instance to start."""
    return [(Role.PREFILL, f"prefill-{i}") for i in range(num_prefill)] + [
        (Role.DECODE, f"decode-{i}") for i in range(num_decode)
    ]
