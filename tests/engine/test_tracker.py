"""Forecasts, ranges and times of requests inside an engine, without one."""

import pytest

from serving_plugin.core.config import ForecastSettings
from serving_plugin.core.forecast import LengthRange
from serving_plugin.engine.tracker import RequestTracker

META = {
    "request_id": "r1",
    "decode_id": "decode-0",
    "forecast": {"edges_tokens": [200, 400], "probabilities": [1.0]},
    "forecast_source": "model",
    "length_range": [200, 400],
    "is_heavy_decode": True,
}


def make_tracker(**settings: object) -> RequestTracker:
    return RequestTracker(ForecastSettings("argmax", **settings))  # type: ignore[arg-type]


def test_forecast_of_the_prefill_leg_is_taken_over() -> None:
    tracked = make_tracker().add("engine-1", "r1", 50, 1000, META, 1.0)
    assert (tracked.request_id, tracked.forecast_source, tracked.is_remote_prefill) == ("r1", "model", True)
    assert tracked.length_range == LengthRange(200, 400)
    assert tracked.is_heavy_decode


def test_a_range_from_history_is_in_force_as_dispatch_decided_it() -> None:
    tracker = make_tracker()
    meta = META | {"forecast_source": "history:drift", "length_range": [220, 380]}
    tracked = tracker.add("engine-1", "r1", 50, 1000, meta, 1.0)
    assert (tracked.forecast_source, tracked.length_range) == ("history:drift", LengthRange(220, 380))
    assert tracker.refresh("engine-1", 380).length_range == LengthRange(380, 540)


def test_a_plain_request_gets_the_history_of_this_engine() -> None:
    tracker = make_tracker(granularity_tokens=100)
    first = tracker.add("a", "a", 10, 80, {}, 0.0)
    assert (first.forecast_source, first.length_range) == ("history", LengthRange(0, 81))
    for number, length in enumerate((250, 260, 20)):
        tracker.add(f"q{number}", f"q{number}", 10, 1000, {}, 0.0)
        tracker.finish(f"q{number}", length, completed=True, now_s=1.0)
    assert tracker.add("b", "b", 10, 1000, {}, 0.0).length_range == LengthRange(200, 300)


def test_aborted_requests_leave_no_history() -> None:
    tracker = make_tracker()
    tracker.add("a", "a", 10, 1000, {}, 0.0)
    tracker.finish("a", 900, completed=False, now_s=1.0)
    assert tracker.add("b", "b", 10, 100, {}, 0.0).length_range == LengthRange(0, 101)


def test_outgrown_range_is_followed_by_its_successor() -> None:
    tracker = make_tracker()
    tracker.add("e", "r1", 50, 1000, META, 0.0)
    assert tracker.refresh("e", 399).length_range == LengthRange(200, 400)
    assert tracker.refresh("e", 400).length_range == LengthRange(400, 600)
    assert tracker.refresh("e", 405).length_range == LengthRange(400, 600)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(900.0, 900.0), (900, 900.0), (1000.5, 1000.0), (0, 1000.0), (-3.0, 1000.0), (float("nan"), 1000.0)]
    + [(odd, 1000.0) for odd in (None, "900", [900.0], 10**400)],
)
def test_a_request_given_back_by_another_instance_keeps_the_moment_it_was_first_queued(
    sent: object, expected: float
) -> None:
    tracked = make_tracker().add("e", "r1", 50, 1000, META | {"queued_since_s": sent}, 1000.0)
    assert (tracked.queued_since_s, tracked.arrived_s, tracked.forecast_source) == (expected, 1000.0, "model")


@pytest.mark.parametrize(
    "change",
    [
        {"forecast": {}},
        {"forecast": 3},
        {"forecast": {"edges_tokens": [0, 9], "probabilities": None}},
        {"forecast": {"edges_tokens": [0, 9, 20], "probabilities": [1.0]}},
        {"forecast": {"edges_tokens": [0, 1e999], "probabilities": [1.0]}},
        {"length_range": [5, 1]},
        {"length_range": [5]},
        {"length_range": [0, 1e999]},
        {"length_range": {"low": 5}},
        {"length_range": 7},
    ],
)
def test_metadata_that_make_no_sense_are_dropped_with_a_warning(
    change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    tracker = make_tracker()
    tracked = tracker.add("e", "r1", 50, 1000, META | change, 1.0)
    assert (tracked.request_id, tracked.forecast_source) == ("r1", "history")
    assert tracked.length_range == LengthRange(0, 1001) and tracked.is_heavy_decode
    (record,) = caplog.records
    assert "request r1: its metadata are unusable" in record.getMessage()
    assert tracker.num_heavy_decodes == 1
    tracker.finish("e", 5, completed=True, now_s=2.0)
    assert tracker.num_heavy_decodes == 0


def test_records_name_what_happened() -> None:
    tracker = make_tracker()
    tracker.add("e", "r1", 50, 1000, META, 0.0)
    tracker.finish("e", 12, completed=True, now_s=2.0)
    (record,) = tracker.records()
    assert record["request_id"] == "r1"
    assert record["num_output_tokens"] == 12
    assert record["finished_s"] == 2.0
    assert tracker.get("e") is None
    assert tracker.finish("e", 12, completed=True, now_s=3.0) is None


@pytest.mark.parametrize(
    ("own_id", "engine_ids"),
    [
        ("r1", ["cmpl-r1-0-aaaaaaaa"]),
        ("r1-1", ["cmpl-r1-1-0-bbbbbbbb"]),
        ("r1-12345678", ["cmpl-r1-12345678-0-cccccccc"]),  # the gateway's own name for a second request "r1"
        ("w", ["0_cmpl-w-0-dddddddd", "1_cmpl-w-0-dddddddd", "cmpl-w-1-eeeeeeee"]),  # samples, and two prompts
        ("c", ["chatcmpl-c-ffffffff"]),
        ("c-12345678", ["chatcmpl-c-12345678-aaaaaaaa"]),
        ("job", ["chatcmpl-job-aaaaaaaa"]),
        ("job_1", ["chatcmpl-job_1-aaaaaaaa"]),
        ("leg", []),  # a leg under way has a name of its own, whatever vLLM calls it
        ("c-2", ["0_chatcmpl-c-2-aaaaaaaa", "1_chatcmpl-c-2-aaaaaaaa"]),
        ("a.b*", ["chatcmpl-a.b*-aaaaaaaa"]),
        ("axb", []),
        ("", []),
        ("r", []),
    ],
)
def test_a_gateways_id_finds_its_own_requests_and_no_others(own_id: str, engine_ids: list[str]) -> None:
    """Ids are clients' to choose: one may begin like another, and the wrong request must not be withdrawn."""
    tracker = make_tracker()
    tracker.add("cmpl-r1-0-aaaaaaaa", "r1", 10, 100, META, 0.0)  # a leg carries its id
    tracker.add("cmpl-r1-1-0-bbbbbbbb", "r1-1", 10, 100, META, 0.0)
    tracker.add("chatcmpl-leg-aaaaaaaa", "leg of another", 10, 100, META, 0.0)
    for engine_id in (
        *("chatcmpl-job-aaaaaaaa", "chatcmpl-job_1-aaaaaaaa"),
        "cmpl-r1-12345678-0-cccccccc",
        *("0_cmpl-w-0-dddddddd", "1_cmpl-w-0-dddddddd", "cmpl-w-1-eeeeeeee"),
        *("chatcmpl-c-ffffffff", "chatcmpl-c-12345678-aaaaaaaa"),
        *("0_chatcmpl-c-2-aaaaaaaa", "1_chatcmpl-c-2-aaaaaaaa"),
        "chatcmpl-a.b*-aaaaaaaa",
    ):
        tracker.add(engine_id, engine_id, 10, 100, {}, 0.0)  # what runs whole does not
    assert tracker.engine_ids(own_id) == engine_ids
    for engine_id in engine_ids:
        tracker.finish(engine_id, 0, completed=False, now_s=1.0)
    assert tracker.engine_ids(own_id) == []
