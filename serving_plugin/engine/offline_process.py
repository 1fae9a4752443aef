"""An `OfflineEngine` in a process of its own, on a core of its own, that runs functions we send it.

This module imports no vLLM, so that whoever only steers engines stays light.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import _run_finalizers  # type: ignore[attr-defined]
from typing import Any, TypeVar

from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.errors import TetriError
from serving_plugin.processes import end_with_parent, free_port

T = TypeVar("T")

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0


class OfflineEngineError(TetriError):
    """An offline engine could not be started, or a function in it failed; the text is the engine's own."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to measure. `settings` None: vLLM's own scheduler. `core`: pinned there; None: not pinned.

    `num_blocks`: size of the KV pool; None: as many as fit `kv_cache_gib` (GiB). `chunk` of vLLM's own scheduler is
    `max_num_batched_tokens`. `enforce_eager` False: vLLM compiles the model and captures CUDA graphs, in minutes.
    """

    model: str
    settings: InstanceSettings | None = None
    core: int | None = 0
    dtype: str = "auto"
    block_size_tokens: int = 32
    num_blocks: int | None = None
    kv_cache_gib: int = 1
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len_tokens: int = 2048
    kv_lease_s: int = 30
    enable_prefix_caching: bool = False
    enforce_eager: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. Times in seconds: `start_s` on the monotonic clock; `scheduler_s` is the part that the
    scheduler took, `schedule` and `update_from_output` together (and `add_request` since the step before). Tokens are
    those scheduled in the step; recomputed ones belong to requests that were preempted after their first token."""

    start_s: float
    duration_s: float
    scheduler_s: float
    num_prompt_tokens: int
    num_recomputed_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int


@dataclass(slots=True)
class Progress:
    """One request's life here. Monotonic seconds; `token_times_s` are the ends of the steps that gave tokens."""

    id: str
    num_prompt_tokens: int
    added_s: float
    token_times_s: list[float]
    first_scheduled_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None


def environment_of(spec: EngineSpec) -> dict[str, str]:
    """What must stand in the environment before vLLM is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in this very process: nothing polls
        "VLLM_PLUGINS": "tetri" if spec.settings is not None else "",
        "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if spec.core is None else str(spec.core),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "NIXL_LOG_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1" if spec.core is not None else str(os.cpu_count() or 1),
    }


class EngineProcess:
    """Started when made, stopped on exit. `call` runs a module-level function over there: `function(engine, *args)`."""

    def __init__(self, spec: EngineSpec, log_path: str = os.devnull) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, theirs, log_path), daemon=True)
        self._process.start()
        theirs.close()
        self._is_ready = False

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Block until the model is loaded. Raises `OfflineEngineError` if that fails or takes longer."""
        if not self._is_ready:
            self._receive(timeout_s)
            self._is_ready = True

    def start_call(self, function: Callable[..., T], *args: Any) -> None:
        """Begin a call; `result` waits for it. One at a time."""
        self.wait_until_ready()
        self._pipe.send((function, args))

    def result(self, timeout_s: float) -> Any:
        """What the call that was begun returned. Raises `OfflineEngineError` if it raised or takes longer."""
        return self._receive(timeout_s)

    @property
    def has_answered(self) -> bool:
        """Whether `result` would return at once: the call has ended, or the process has."""
        return self._pipe.poll()

    def call(self, function: Callable[..., T], *args: Any, timeout_s: float = 600.0) -> T:
        """`start_call` and `result`."""
        self.start_call(function, *args)
        result: T = self.result(timeout_s)
        return result

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            self.close()
            raise OfflineEngineError(f"the engine gave no answer within {timeout_s:g} s")
        try:
            is_ok, value = self._pipe.recv()
        except EOFError:
            self.close()
            raise OfflineEngineError(f"the engine's process ended (exit code {self._process.exitcode})") from None
        if not is_ok:
            raise OfflineEngineError(value)
        return value

    def close(self) -> None:
        """End the process within a bound; idempotent."""
        self._pipe.close()  # an idle engine sees the end of its pipe and leaves
        self._process.join(timeout=1.0 if self._is_ready else 0.0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(timeout=STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=STOP_TIMEOUT_S)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _serve(spec: EngineSpec, pipe: Connection, log_path: str) -> None:
    end_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ.update(environment_of(spec))
    if spec.core is not None:
        os.sched_setaffinity(0, {spec.core})
    try:
        from serving_plugin.engine.offline import OfflineEngine

        engine = OfflineEngine(spec)
    except BaseException as error:
        traceback.print_exc()
        pipe.send((False, f"the engine did not start: {_one_line(error)}"))
        return
    pipe.send((True, None))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(engine, *args))
        except Exception as error:
            traceback.print_exc()
            answer = (False, f"{getattr(function, '__name__', function)}: {_one_line(error)}")
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            break
    _run_finalizers(0)  # semaphores of libraries, which would be reported as leaked
    os._exit(0)  # vLLM's and NIXL's threads need not be waited for


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
