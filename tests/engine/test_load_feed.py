"""Snapshots travel from one thread to another; busy_fraction over its window."""

import threading
import uuid

import pytest

from serving_plugin.engine.load_feed import BusyWindow, EngineSnapshot, LoadPublisher, LoadReceiver, TransferEvent


def test_snapshots_and_events_arrive() -> None:
    engine_id = uuid.uuid4().hex
    received: list[EngineSnapshot] = []
    events: list[TransferEvent] = []
    arrived = threading.Event()

    def on_message(snapshot: EngineSnapshot, more: list[TransferEvent]) -> None:
        received.append(snapshot)
        events.extend(more)
        if snapshot.num_running == 7 and events:
            arrived.set()

    publisher = LoadPublisher(engine_id, interval_s=0.02)
    event = TransferEvent("r1", 1.0, 2.0, 640)
    publisher.add_event(event)  # nobody listens yet: it must not be lost
    snapshot = EngineSnapshot(num_running=7, decode_busy=0.25, is_over_pinned_budget=True)
    publisher.publish(snapshot)
    receiver = LoadReceiver(engine_id, on_message)
    receiver.start()
    try:
        assert arrived.wait(10)
    finally:
        publisher.close()
        receiver.close()
    assert events == [event]
    assert received[-1] == snapshot


@pytest.mark.parametrize(
    ("samples", "is_prefill", "expected"),
    [
        ([(0.0, 0.0, 0.0)], True, 0.0),
        ([(0.0, 0.0, 0.0), (10.0, 5.0, 0.0)], True, 0.5),
        ([(0.0, 0.0, 0.0), (50.0, 50.0, 0.0), (110.0, 50.0, 0.0)], True, 0.0),  # busy before the window only
        ([(0.0, 0.0, 0.2), (1.0, 0.0, 0.6)], False, 0.4),
        ([(0.0, 0.0, 0.0), (10.0, 20.0, 0.0)], True, 1.0),
    ],
)
def test_busy_fraction(samples: list[tuple[float, float, float]], is_prefill: bool, expected: float) -> None:
    window = BusyWindow(window_s=60.0)
    for now_s, prefill_busy_s, decode_busy in samples:
        snapshot = EngineSnapshot(prefill_busy_s=prefill_busy_s, decode_busy=decode_busy)
        fraction = window.update(snapshot, now_s, is_prefill)
    assert fraction == pytest.approx(expected)
