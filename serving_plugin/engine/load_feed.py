"""How load leaves the EngineCore process: an immutable snapshot and a thread that ships it.

The scheduler publishes a snapshot after every change of its state; nobody iterates its containers from a thread. An
idle core blocks in its input queue, so the shipping thread has a clock of its own. Transport: ZeroMQ PUSH/PULL over
ipc, one socket per instance, named after the engine id that both processes share.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

from serving_plugin.core.errors import ConfigurationError

logger = logging.getLogger(__name__)

BUSY_WINDOW_S = 60.0
MAX_PENDING_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Loads of one engine at one moment; the fields are those of `core.types.InstanceLoad` that the engine knows.

    `prefill_busy_s` is cumulative time in steps that held prompt tokens, `decode_busy` the share of KV blocks or of
    request slots in use, whichever is larger.
    """

    num_waiting: int = 0
    num_loading: int = 0
    num_running: int = 0
    num_waiting_prompt_tokens: int = 0
    num_vetoed_tokens: int = 0
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_pinned_blocks: int = 0
    block_size_tokens: int = 0
    num_heavy_decodes: int = 0
    num_light_decodes: int = 0
    prefill_busy_s: float = 0.0
    decode_busy: float = 0.0
    is_over_pinned_budget: bool = False


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """A decode instance has pulled (or failed to pull) one request's KV cache. Times in unix seconds."""

    request_id: str
    transfer_start_s: float
    transfer_end_s: float
    num_remote_tokens: int


def feed_endpoint(engine_id: str) -> str:
    """ipc address of one instance's feed; both of its processes derive it from the shared engine id."""
    return f"ipc://{Path(tempfile.gettempdir()) / f'tetri-{os.getuid()}-{engine_id}.feed'}"


class LoadPublisher:
    """EngineCore's side: `publish` and `add_event` are cheap and never block; a daemon thread ships them."""

    def __init__(self, engine_id: str, interval_s: float) -> None:
        self._latest = EngineSnapshot()
        self._events: deque[TransferEvent] = deque(maxlen=MAX_PENDING_EVENTS)
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._endpoint = feed_endpoint(engine_id)
        self._thread = threading.Thread(target=self._ship, name="tetri-load-feed", daemon=True)
        self._thread.start()

    def publish(self, snapshot: EngineSnapshot) -> None:
        """Make `snapshot` the one that is shipped next."""
        self._latest = snapshot

    def add_event(self, event: TransferEvent) -> None:
        """Queue an event for the next shipment; the oldest is dropped when nobody listens."""
        self._events.append(event)

    def close(self) -> None:
        """Stop the thread within one interval."""
        self._stopped.set()
        self._thread.join(timeout=2.0)

    def _ship(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 4)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        while not self._stopped.wait(self._interval_s):
            events = [self._events.popleft() for _ in range(len(self._events))]
            message = {"snapshot": asdict(self._latest), "events": [asdict(event) for event in events]}
            try:
                socket.send_string(json.dumps(message), zmq.NOBLOCK)
            except zmq.Again:  # the API server is slow or gone: loads are soft state, events are kept
                self._events.extendleft(reversed(events))
        socket.close()


class BusyWindow:
    """busy_fraction over `BUSY_WINDOW_S` from successive snapshots (definitions: "Roles and instances")."""

    def __init__(self, window_s: float = BUSY_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float, float]] = deque()  # (time, cumulative prefill busy, decode busy)

    def update(self, snapshot: EngineSnapshot, now_s: float, is_prefill: bool) -> float:
        """Add a sample and return the fraction for the given role, within [0, 1]."""
        self._samples.append((now_s, snapshot.prefill_busy_s, snapshot.decode_busy))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()
        start_s, busy_at_start_s, _ = self._samples[0]
        if is_prefill:
            elapsed_s = now_s - start_s
            busy = (snapshot.prefill_busy_s - busy_at_start_s) / elapsed_s if elapsed_s > 0 else 0.0
        else:
            busy = sum(sample[2] for sample in self._samples) / len(self._samples)
        return min(1.0, max(0.0, busy))


class LoadReceiver:
    """The API server's side, on a thread of its own; `on_message` is called there."""

    def __init__(self, engine_id: str, on_message: Callable[[EngineSnapshot, list[TransferEvent]], None]) -> None:
        self._endpoint = feed_endpoint(engine_id)
        self._on_message = on_message
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="tetri-load-receiver", daemon=True)

    def start(self) -> None:
        """Bind and begin; a stale socket file of a dead process is replaced by ZeroMQ.

        Raises:
            ConfigurationError: the address cannot be bound.
        """
        self._socket.setsockopt(zmq.RCVTIMEO, 500)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"cannot bind {self._endpoint} ({error}); a shorter TMPDIR (an ipc path has at most 107 bytes) may help"
            ) from None
        self._thread.start()

    def close(self) -> None:
        """Stop within a second and remove the socket file."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _receive(self) -> None:
        # The socket was bound by `start` and belongs to this thread from here on.
        while not self._stopped.is_set():
            try:
                raw: dict[str, Any] = json.loads(self._socket.recv_string())
            except zmq.Again:
                continue
            events = [TransferEvent(**event) for event in raw["events"]]
            self._on_message(EngineSnapshot(**raw["snapshot"]), events)
        self._socket.close()


def unix_now_s() -> float:
    """Unix time in seconds: the clock of everything that leaves a process."""
    return time.time()
