"""The load generator against a stub: right counts and times, and every fault an outcome."""

from __future__ import annotations

import time
from typing import Any

import pytest
from stub_openai import StubServer

from serving_plugin.bench.loadgen import (
    Lengths,
    LoadOptions,
    Progress,
    fetch_gateway_rows,
    fetch_model_name,
    merge_gateway_rows,
    run_load,
)
from serving_plugin.bench.workloads import BenchRequest
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import Outcome


def make_requests(count: int, num_output_tokens: int = 5, gap_s: float = 0.0) -> list[BenchRequest]:
    return [BenchRequest(f"r{i}", f"prompt {i}", 2, num_output_tokens, i * gap_s, "lpld") for i in range(count)]


def options(*urls: str, **changes: Any) -> LoadOptions:
    return LoadOptions(urls, "tiny-words", **{"request_timeout_s": 10.0, **changes})


@pytest.mark.parametrize("with_running_usage", [True, False])
async def test_every_token_has_a_time_and_the_body_asks_for_fixed_work(stub, with_running_usage):
    server = StubServer(with_running_usage=with_running_usage)
    before_s = time.time()
    records = await run_load(make_requests(3), options(await stub(server)))
    assert [r.id for r in records] == ["bench-r0", "bench-r1", "bench-r2"] and set(server.ids) == {
        r.id for r in records
    }
    for record in records:
        assert (record.outcome, record.num_output_tokens, len(record.token_times_s)) == (Outcome.OK, 5, 5)
        assert record.error is None and record.workload_class == "lpld"
        assert list(record.token_times_s) == sorted(record.token_times_s)
        assert before_s - 1 < record.arrival_s < record.first_token_s < record.last_token_s < time.time() + 1
    body = server.bodies[0]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (5, True, True)
    assert body["stream_options"]["include_usage"] and "seed" not in body


async def test_an_event_with_two_tokens_counts_two(stub):
    [record] = await run_load(make_requests(1, 5), options(await stub(StubServer(tokens_per_event=2))))
    assert (record.num_output_tokens, len(record.token_times_s), record.error) == (5, 5, None)
    assert record.token_times_s[0] == record.token_times_s[1] < record.token_times_s[2]


async def test_without_running_usage_merged_tokens_are_noted(stub):
    server = StubServer(tokens_per_event=2, with_running_usage=False)
    [record] = await run_load(make_requests(1, 5), options(await stub(server)))
    assert record.outcome is Outcome.OK and record.num_output_tokens == 5
    assert record.error == "note: 3 tokens counted at the client, usage says 5"


async def test_natural_lengths_have_a_cap_and_no_ignore_eos(stub):
    server = StubServer(short_by=3)
    natural = options(await stub(server), lengths=Lengths.NATURAL, max_output_tokens=9)
    [record] = await run_load(make_requests(1, 5), natural)
    assert (record.outcome, record.num_output_tokens) == (Outcome.OK, 6)
    assert server.bodies[0]["max_tokens"] == 9 and "ignore_eos" not in server.bodies[0]


async def test_too_short_an_output_is_an_error_when_lengths_are_fixed(stub):
    [record] = await run_load(make_requests(1, 5), options(await stub(StubServer(short_by=1))))
    assert (record.outcome, record.error) == (Outcome.ERROR, "asked for 5 tokens, got 4")


@pytest.mark.parametrize(
    ("fault", "outcome", "message", "num_tokens"),
    [
        ({"status": 429}, Outcome.REJECTED, "HTTP 429: queue is full", 0),
        ({"status": 500}, Outcome.ERROR, "HTTP 500: queue is full", 0),
        ({"drop_after_tokens": 3}, Outcome.ERROR, "Client", 3),
        ({"error_after_tokens": 2}, Outcome.ERROR, "decode instance lost", 2),
        ({"hang_after_tokens": 1}, Outcome.ERROR, r"no end within 0.5 s \(--request-timeout-s\)", 1),
    ],
)
async def test_faults_are_outcomes(stub, fault, outcome, message, num_tokens):
    url = await stub(StubServer(**fault))
    [record] = await run_load(make_requests(1), options(url, request_timeout_s=0.5))
    assert record.outcome is outcome and len(record.token_times_s) == num_tokens
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(record.error)


async def test_one_dead_server_does_not_stop_the_others(stub):
    alive = StubServer()
    records = await run_load(
        make_requests(4), options(await stub(alive), "http://127.0.0.1:9", instance_names=("a", "b"))
    )
    assert [r.outcome for r in records] == [Outcome.OK, Outcome.ERROR] * 2
    assert [r.decode_instance for r in records] == ["a", "b", "a", "b"]
    assert len(alive.bodies) == 2


async def test_arrivals_are_kept_and_requests_overlap(stub):
    server = StubServer(token_interval_s=0.05)
    records = await run_load(make_requests(4, 5, gap_s=0.1), options(await stub(server)))
    starts = [r.arrival_s - records[0].arrival_s for r in records]
    assert starts == pytest.approx([0, 0.1, 0.2, 0.3], abs=0.08)
    assert server.max_running > 1


async def test_progress_ends_complete(stub):
    seen: list[Progress] = []
    await run_load(make_requests(3), options(await stub(StubServer())), seen.append)
    assert seen[-1] == Progress(num_total=3, num_sent=3, num_first_tokens=3, num_done=3, num_failed=0)
    assert [p.num_done for p in seen] == sorted(p.num_done for p in seen)


async def test_gateway_rows_are_merged_by_id_and_client_times_stay(stub):
    row = {
        "id": "bench-r0",
        "first_token_s": 1.0,
        "dispatch_s": 5.0,
        "transfer_end_s": 6.0,
        "prefill_instance": "prefill-0",
        "decode_instance": "decode-0",
        "length_range": {"low_tokens": 0, "high_tokens": 200},
    }
    url = await stub(StubServer(rows=[{"id": "other"}, row]))
    records = await run_load(make_requests(2), options(url))
    first, second = merge_gateway_rows(records, await fetch_gateway_rows(url, 10) or [])
    assert (first.dispatch_s, first.transfer_end_s, first.length_range) == (5.0, 6.0, LengthRange(0, 200))
    assert (first.prefill_instance, first.decode_instance) == ("prefill-0", "decode-0")
    assert first.first_token_s == records[0].first_token_s
    assert second.prefill_instance is None and second.decode_instance is None


async def test_a_plain_server_has_a_model_and_no_rows(stub):
    url = await stub(StubServer())
    assert await fetch_gateway_rows(url, 10) is None
    assert await fetch_model_name(url) == "tiny-words"
    assert await fetch_gateway_rows("http://127.0.0.1:9", 10) == []  # gone: which instance served what is not known
    with pytest.raises(ConfigurationError, match="does not answer"):
        await fetch_model_name("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("urls", "changes", "message"),
    [
        ((), {}, "--base-url"),
        (("localhost:8000",), {}, "localhost:8000"),
        (("http://a",), {"request_timeout_s": 0}, "timeout"),
    ],
)
def test_bad_options_are_refused(urls, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        LoadOptions(urls, "m", **changes)
