"""vLLM's NIXL pull connector, kept whole, with what TetriServe needs on top.

- Keeps its CPU affinity: 0.32.0 pins the worker to the last core of the NUMA node (`nixl/base_worker.py:702-714`), so
  two instances on one host would share that core.
- Lets NIXL's progress thread sleep between polls: the Python wrapper hard-codes a spinning one, which takes half a core
  from the model on hosts with few cores.
- Link `direct`: shared memory between instances on one host, where UCX would take TCP.
- Returns our own request id and times with the prefill leg: `request_finished` of 0.32.0 builds a fresh dict.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
from vllm.v1.request import Request

from serving_plugin.engine.load_feed import unix_now_s
from serving_plugin.engine.seeded_rows import install_seed_guard
from serving_plugin.engine.settings import settings_of

PROGRESS_POLL_INTERVAL_US = 1000


class TetriConnector(NixlPullConnector):
    """NIXL READ from the prefill instance, with affinity kept and request metadata carried through."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.WORKER:
            install_seed_guard()
            settings = settings_of(vllm_config)
            _let_progress_thread_sleep()
            if settings.transfer.link == "direct":
                _use_shared_memory_only()
        with _affinity_kept():
            super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """As NIXL's, without moving the worker to another core."""
        with _affinity_kept():
            super().register_kv_caches(kv_caches)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As NIXL's, with our metadata in the parameters that the response carries."""
        return _with_metadata(request, *super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for several KV cache groups."""
        return _with_metadata(request, *super().request_finished_all_groups(request, block_ids))


def _with_metadata(
    request: Request, delay_free: bool, params: dict[str, Any] | None
) -> tuple[bool, dict[str, Any] | None]:
    meta = (request.kv_transfer_params or {}).get("tetri")
    if params is not None and isinstance(meta, dict):
        params["tetri"] = {**meta, "num_prompt_tokens": request.num_prompt_tokens, "prefill_end_s": unix_now_s()}
    return delay_free, params


@contextmanager
def _affinity_kept() -> Iterator[None]:
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _let_progress_thread_sleep() -> None:
    """Wrap the binding's agent constructor so that the progress thread polls every millisecond. Idempotent.

    The configuration object is made inside `nixl._api.nixl_agent.__init__`: only the binding can be reached.
    """
    for api in _nixl_apis():
        make_agent = api.nixlBind.nixlAgent
        if getattr(make_agent, "tetri_sleeps", False):
            continue

        def make_sleeping_agent(agent_name: str, config: Any, make_agent: Any = make_agent) -> Any:
            config.pthrDelay = PROGRESS_POLL_INTERVAL_US
            return make_agent(agent_name, config)

        make_sleeping_agent.tetri_sleeps = True  # type: ignore[attr-defined]
        api.nixlBind.nixlAgent = make_sleeping_agent


def _use_shared_memory_only() -> None:
    """Link `direct`: UCX over shared memory, whose transports have no peer error handling. Idempotent.

    With it (NIXL's default) UCX falls back to TCP even on one host: a READ is then emulated by messages, and a progress
    thread whose socket stays writable spins for as long as a transfer is under way.
    """
    os.environ.setdefault("UCX_TLS", "sm,self")
    for api in _nixl_apis():
        create_backend = api.nixl_agent.create_backend
        if getattr(create_backend, "tetri_direct", False):
            continue

        def create_direct_backend(
            self: Any,
            backend: str,
            init_params: dict[str, str] | None = None,
            create_backend: Any = create_backend,
        ) -> Any:
            more = {"ucx_error_handling_mode": "none"} if backend == "UCX" else {}
            return create_backend(self, backend, {**(init_params or {}), **more})

        create_direct_backend.tetri_direct = True  # type: ignore[attr-defined]
        api.nixl_agent.create_backend = create_direct_backend


def _nixl_apis() -> Iterator[Any]:
    """The `_api` modules of the installed NIXL builds (one per CUDA release)."""
    for name in ("nixl_cu13._api", "nixl_cu12._api", "nixl._api"):
        with suppress(ImportError):
            yield importlib.import_module(name)
