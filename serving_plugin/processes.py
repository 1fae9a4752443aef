"""Child processes that end with us: start, pin, watch, wait until ready, stop within a bound.

Used by whoever starts servers (launcher, benchmarks, the predictor's owner). Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from serving_plugin.core.errors import ConfigurationError, LostInstanceError
from serving_plugin.preflight import port_problem

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """In a child that `multiprocessing` started: end at once when the parent does, however it ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. `cores` pins the child and all that it starts; `log_path` takes its standard output and error."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()


class Child:
    """One running child process in a process group of its own."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        parent_pid = os.getpid()

        def before_exec() -> None:
            if _LIBC is not None:
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != parent_pid:  # the parent died before prctl took effect
                    os._exit(1)
            if spec.cores:
                os.sched_setaffinity(0, spec.cores)

        with spec.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.environment},
                start_new_session=True,
                preexec_fn=before_exec,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the process group's."""
        return self.process.pid

    def exit_code(self) -> int | None:
        """Exit code, or None while it runs."""
        return self.process.poll()

    def log_tail(self, num_lines: int = 15) -> str:
        """Last lines of the child's log, for an error message."""
        try:
            return "\n".join(self.spec.log_path.read_text(errors="replace").splitlines()[-num_lines:])
        except OSError:
            return ""

    def stop(self, grace_s: float = 20.0) -> None:
        """SIGTERM to the child, then SIGKILL to whatever is left of its group. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not end within %.0f s and is killed", self.spec.name, grace_s)
        self._kill_group()
        with contextlib.suppress(subprocess.TimeoutExpired):  # unkillable: nothing more can be done, go on with others
            self.process.wait(5)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def stop_all(children: Sequence[Child], grace_s: float = 20.0) -> None:
    """Stop all children together: every one gets SIGTERM first, then one shared grace period."""
    for child in children:
        if child.exit_code() is None:
            child.process.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.stop(max(0.1, deadline - time.monotonic()))


def wait_until_ready(
    children: Mapping[str, Child],
    timeout_s: float,
    on_progress: Callable[[set[str], float], None] = lambda waiting, elapsed_s: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Block until every URL in `children` answers 200.

    Raises:
        LostInstanceError: a child ended before it was ready; the message holds the end of its log.
        ConfigurationError: the time is over.
    """
    start = time.monotonic()
    waiting = set(children)
    while waiting and not should_stop():
        for url in sorted(waiting):
            child = children[url]
            if child.exit_code() is not None:
                raise LostInstanceError(
                    f"{child.spec.name} ended with code {child.exit_code()} before it was ready; "
                    f"log {child.spec.log_path}:\n{child.log_tail()}"
                )
            if is_up(url):
                waiting.discard(url)
        elapsed_s = time.monotonic() - start
        on_progress({children[url].spec.name for url in waiting}, elapsed_s)
        if waiting and elapsed_s > timeout_s:
            names = ", ".join(sorted(children[url].spec.name for url in waiting))
            raise ConfigurationError(
                f"{names} not ready after {timeout_s:.0f} s; see the logs, or raise --ready-timeout-s"
            )
        if waiting:
            time.sleep(0.5)


def is_up(url: str, timeout_s: float = 2.0) -> bool:
    """Whether `url` answers with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def require_free_port(port: int, flag: str, host: str = "127.0.0.1") -> None:
    """Raise `ConfigurationError` naming `flag` if `port` is taken."""
    problem = port_problem(port, flag, host)
    if problem is not None:
        raise ConfigurationError(problem)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
