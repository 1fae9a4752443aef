"""The gateway over real sockets, with stub instances: what clients see, what instances see, what is recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import aiohttp
import pytest
from aiohttp import web
from stub_instance import make_load, sse

from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import InstanceState, Outcome, Role
from serving_plugin.wire import LEG_HEADER, RELINQUISH_HEADER, TransferReport

pytestmark = pytest.mark.timeout(60)


def kinds(stub) -> list[str]:
    return [leg.kind for leg in stub.legs]


async def test_a_completion_is_prefilled_on_p_and_decoded_on_d(cluster):
    status, answer = await cluster.complete(
        max_tokens=50, seed=1, stop=["x"], headers={"X-Request-Id": "mine", "Authorization": "Bearer k"}
    )
    p0, d0 = cluster.instances["p0"], cluster.instances["d0"]
    assert (status, answer["choices"][0]["text"]) == (200, "abc")
    assert answer["kv_transfer_params"] is None
    assert (kinds(p0), kinds(d0)) == (["prefill"], ["decode"])
    prefill, decode = p0.legs[0], d0.legs[0]
    assert prefill.path == decode.path == "/v1/completions"
    assert prefill.body["max_tokens"] == 1 and "seed" not in prefill.body
    assert prefill.body["kv_transfer_params"]["tetri"]["max_tokens"] == 50
    assert (decode.body["max_tokens"], decode.body["seed"], decode.body["stop"]) == (50, 1, ["x"])
    assert decode.body["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]
    assert prefill.headers["X-Request-Id"] == decode.headers["X-Request-Id"] == "mine"
    assert prefill.headers["Authorization"] == decode.headers["Authorization"] == "Bearer k"
    record = cluster.record()
    assert (record.id, record.outcome, record.error) == ("mine", Outcome.OK, None)
    assert (record.prefill_instance, record.decode_instance, record.whole_reason) == ("p0", "d0", None)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (7, 3)
    assert record.length_range == LengthRange(0, 200)
    assert record.arrival_s <= record.prefill_start_s <= record.dispatch_s <= record.last_token_s


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_comes_through_byte_for_byte(cluster, path, include_usage):
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with cluster.http.post(path, json={"model": "m", "stream": True, **body, **options}) as response:
        raw = await response.read()
        assert response.content_type == "text/event-stream"
    d0 = cluster.instances["d0"]
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert raw == b"".join(d0.events(d0.legs[0], usage))
    assert "stream_options" not in cluster.instances["p0"].legs[0].body
    record = cluster.record()
    assert (record.outcome, record.num_output_tokens, record.num_prompt_tokens) == (Outcome.OK, 3, 7)
    assert record.arrival_s <= record.first_token_s <= record.last_token_s


async def test_what_only_gateways_may_say_is_stripped(cluster):
    forged = {"do_remote_prefill": True, "remote_host": "evil"}
    await cluster.complete(
        kv_transfer_params=forged, vllm_xargs={"tetri_first_token": 1, "kv_transfer_params": "x", "mine": 2}
    )
    await cluster.complete(kv_transfer_params=forged, echo=True)
    prefill, decode, whole = cluster.instances["p0"].legs[0], *cluster.instances["d0"].legs
    assert "evil" not in json.dumps([prefill.body, decode.body, whole.body])
    assert "kv_transfer_params" not in whole.body
    assert prefill.body["vllm_xargs"] == decode.body["vllm_xargs"] == {"mine": 2}


@pytest.mark.parametrize(
    ("body", "reason", "instance"),
    [
        ({"n": 2}, "n", "d0"),
        ({"echo": True}, "echo", "d0"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "d0"),
        ({"max_tokens": 1}, "one_token", "p0"),
        ({"max_tokens": "many"}, "odd_max_tokens", "d0"),
        ({"max_tokens": 0}, "odd_max_tokens", "d0"),
        ({"stream_options": "x"}, "odd_stream_options", "d0"),
    ],
)
async def test_what_cannot_be_split_runs_whole(cluster, body, reason, instance):
    status, _ = await cluster.complete(**body)
    assert status == 200
    (leg,) = cluster.instances[instance].legs
    assert leg.kind == "whole" and leg.body == {"model": "m", "prompt": "hi", **body}
    other = "d0" if instance == "p0" else "p0"
    assert cluster.instances[other].legs == []
    record = cluster.record()
    assert (record.whole_reason, record.prefill_instance, record.decode_instance) == (reason, instance, instance)
    metrics = await (await cluster.http.get("/metrics")).text()
    assert f'tetri_whole_requests_total{{reason="{reason}"}} 1.0' in metrics


@pytest.mark.parametrize("failing", ["p0", "d0"])
async def test_an_instances_own_error_passes_unchanged(cluster, failing):
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}}

    async def refuse(stub, request, leg):
        return web.json_response(error, status=400)

    cluster.instances[failing].answer = refuse
    assert await cluster.complete() == (400, error)
    record = cluster.record()
    assert record.outcome is Outcome.REJECTED and "too long" in record.error
    assert len(cluster.instances["d0"].legs) == (failing == "d0")


async def test_d_lost_under_the_stream_becomes_an_error_event(cluster):
    async def die(stub, request, leg):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sse({"choices": [{"index": 0, "text": "a"}]}) + b'data: {"choices":[{"ind')
        await asyncio.sleep(0.05)
        request.transport.abort()
        return response

    cluster.instances["d0"].answer = die
    async with cluster.http.post("/v1/completions", json={"prompt": "hi", "stream": True}) as response:
        events = (await response.read()).decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "a"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 502  # in place of the broken event
    assert events[2:] == ["data: [DONE]", ""]
    record = cluster.record()
    assert (record.outcome, record.num_output_tokens) == (Outcome.ERROR, 1)
    assert "d0 was lost under the stream" in record.error


async def test_an_error_event_of_the_engine_is_recorded(cluster):
    async def fail(stub, request, leg):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sse({"error": {"message": "engine died", "code": 500}}) + b"data: [DONE]\n\n")
        return response

    cluster.instances["d0"].answer = fail
    async with cluster.http.post("/v1/completions", json={"prompt": "hi", "stream": True}) as response:
        assert b"engine died" in await response.read()
    assert (cluster.record().outcome, cluster.record().error) == (Outcome.ERROR, "engine died")


@pytest.mark.parametrize("lost", ["p0", "d0"])
async def test_an_instance_that_takes_no_connection_is_502(cluster, lost):
    """Its control connection still stands, as when a process hangs: nobody else can take the request."""
    await cluster.instances[lost]._runner.cleanup()
    status, answer = await cluster.complete()
    assert (status, answer["error"]["type"]) == (502, "BadGatewayError")
    assert lost in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert cluster.record().outcome is Outcome.ERROR


async def test_a_lost_p_is_replaced_by_another_before_anything_was_sent(cluster):
    await cluster.add("p1", Role.PREFILL)
    await cluster.instances["p0"]._runner.cleanup()
    status, _ = await cluster.complete()
    assert (status, cluster.record().prefill_instance) == (200, "p1")


@pytest.mark.parametrize("draining", ["p0", "d0"])
async def test_a_draining_instances_503_is_tried_elsewhere(cluster, draining):
    async def refuse(stub, request, leg):
        return web.json_response({"error": {"message": "draining"}}, status=503)

    stub = cluster.instances[draining]
    stub.answer = refuse
    status, answer = await cluster.complete()
    assert (status, answer["error"]["message"]) == (503, "draining")  # nobody else: its own answer
    other = await cluster.add(draining[0] + "1", stub.role)
    if stub.role is Role.DECODE:
        del cluster.instances[draining]  # as P's dispatcher would, once it hears of the drain

        async def dispatch(p0, request, leg):  # first to the draining one, which it has not heard of
            target = stub if len(p0.legs) == 2 else other
            return await p0.prefill(leg, decode_id=target.instance_id, decode_url=target.url)

        cluster.instances["p0"].answer = dispatch
    try:
        status, _ = await cluster.complete()
        assert (status, len(other.legs)) == (200, 1)
    finally:
        cluster.instances[draining] = stub


async def test_a_keepalive_connection_closed_by_the_peer_is_replaced(bare):
    """uvicorn closes idle connections: the next request must not fail for it."""
    p0 = await bare.add("p0", Role.PREFILL)
    await bare.add("d0", Role.DECODE)
    assert (await bare.complete())[0] == 200

    async def hang_up_once(stub, request, leg):
        if len(stub.legs) == 2:
            request.transport.abort()
            await asyncio.sleep(1)
        return await stub.prefill(leg)

    p0.answer = hang_up_once
    assert (await bare.complete())[0] == 200
    assert kinds(p0) == ["prefill"] * 3
    assert 'tetri_leg_retries_total{leg="prefill"} 1.0' in await (await bare.http.get("/metrics")).text()


async def test_nowhere_to_decode_is_503_with_the_dispatchers_reason(cluster):
    async def nowhere(stub, request, leg):
        return await stub.prefill(leg, decode_id=None, decode_url=None, error="d0 is draining")

    cluster.instances["p0"].answer = nowhere
    status, answer = await cluster.complete()
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (503, "ServiceUnavailableError", 503)
    assert "d0 is draining" in answer["error"]["message"]
    assert cluster.record().outcome is Outcome.REJECTED


async def test_a_p_without_the_plugin_is_named(cluster):
    async def plain(stub, request, leg):
        return web.json_response({"choices": [], "kv_transfer_params": None})

    cluster.instances["p0"].answer = plain
    status, answer = await cluster.complete()
    assert status == 502 and "p0" in answer["error"]["message"] and "VLLM_PLUGINS=tetri" in answer["error"]["message"]


@pytest.mark.parametrize("stage", ["p0", "d0", "stream"])
async def test_a_client_that_hangs_up_ends_the_leg_at_once(cluster, stage):
    async def hang(stub, request, leg):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if stage == "stream":
            await response.prepare(request)
            await response.write(sse({"choices": [{"index": 0, "text": "a"}]}))
        await asyncio.sleep(30)
        return response

    stub = cluster.instances["p0" if stage == "p0" else "d0"]
    stub.answer = hang
    async with aiohttp.ClientSession(cluster.url) as client:
        request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi", "stream": True}))
        await cluster.until(lambda: stub.legs)
        if stage == "stream":
            response = await request
            await response.content.readany()
            response.close()
        else:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
    await asyncio.wait_for(stub.aborted.wait(), 2)
    await cluster.until(lambda: len(cluster.gateway.table) == 0)
    assert cluster.record().outcome is Outcome.CANCELLED


# Instances without room

OVERLOADED = {"error": {"message": "waited 60 s", "type": "RateLimitError", "param": None, "code": 429}}


async def relinquished(cluster) -> dict[str, float]:
    """What /metrics counts, by instance."""
    lines = (await (await cluster.http.get("/metrics")).text()).splitlines()
    counted = [line.split() for line in lines if line.startswith("tetri_relinquished_total{")]
    return {name.split('"')[1]: float(number) for name, number in counted}


def may_be_given_back(stub) -> list[bool]:
    """Of each decode leg that the stub got."""
    return [RELINQUISH_HEADER in leg.headers for leg in stub.legs if leg.kind == "decode"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_decode_instance_gives_back_goes_to_another_without_a_second_prefill(cluster, path, stream):
    p0, d0 = cluster.instances["p0"], cluster.instances["d0"]
    d0.num_to_relinquish = 1
    d1 = await cluster.add("d1", Role.DECODE, tokens=("from", "d1"))
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer k"}
    body = {"model": "m", "stream": stream, "seed": 1, **prompt}
    async with cluster.http.post(path, json=body, headers=headers) as response:
        raw = await response.read()
        assert response.status == 200 and RELINQUISH_HEADER not in response.headers
    if stream:
        assert raw == b"".join(d1.events(d1.legs[0]))
    else:
        assert json.loads(raw)["choices"][0]["text"] == "fromd1"
    assert (kinds(p0), kinds(d0), kinds(d1)) == (["prefill"], ["decode"], ["decode"])
    assert d1.legs[0].body == d0.legs[0].body and d1.legs[0].body["seed"] == 1, "P's word on the KV cache, verbatim"
    (asked,) = p0.redispatched
    told = d0.legs[0].body["kv_transfer_params"]["tetri"]
    since_s = told.pop("queued_since_s")
    assert asked == {"tetri": told, "exclude": ["d0"]}
    assert asked["tetri"]["request_id"] == "mine"
    assert [leg.headers["Authorization"] for leg in (*p0.legs, *d0.legs, *d1.legs)] == ["Bearer k"] * 3
    record = cluster.record()
    assert (record.outcome, record.error) == (Outcome.OK, None)
    assert (record.prefill_instance, record.decode_instance) == ("p0", "d1")
    assert record.prefill_end_s <= since_s <= record.last_token_s, "of the first of both: it keeps its place"
    assert await relinquished(cluster) == {"d0": 1.0}


async def nobody(p0, request, body):
    return web.json_response({"decode_id": None, "decode_url": None})


async def broken(p0, request, body):
    return web.json_response({"error": "no"}, status=500)


async def unknown(p0, request, body):
    return web.json_response({"detail": "Not Found"}, status=404)


async def nonsense(p0, request, body):
    return web.json_response(["d1"])


async def half_an_answer(p0, request, body):
    return web.json_response({"decode_id": "d1"})


async def no_json(p0, request, body):
    return web.Response(body=b"{", content_type="application/json")


async def hangs(p0, request, body):
    await asyncio.sleep(30)


async def hangs_up(p0, request, body):
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("answer", [nobody, broken, unknown, nonsense, half_an_answer, no_json, hangs, hangs_up])
async def test_without_another_instance_from_p_it_goes_back_to_the_same_one(bare, answer):
    await bare.stop()
    await bare.start(connect_timeout_s=0.3 if answer is hangs else 3.0)
    p0 = await bare.add("p0", Role.PREFILL, redispatch=answer)
    d0 = await bare.add("d0", Role.DECODE, num_to_relinquish=1)
    d1 = await bare.add("d1", Role.DECODE)
    status, _ = await asyncio.wait_for(bare.complete(), 15)
    assert (status, kinds(p0), kinds(d0), kinds(d1)) == (200, ["prefill"], ["decode"] * 2, [])
    assert len(p0.redispatched) == 1
    assert (bare.record().outcome, bare.record().decode_instance) == (Outcome.OK, "d0")


async def test_p_that_has_left_meanwhile_is_not_asked(cluster):
    p0, d0 = cluster.instances["p0"], cluster.instances["d0"]

    async def give_back_once_p_is_gone(stub, request, leg):
        if len(stub.legs) > 1:
            return await stub.generate(request, leg)
        await p0.hang_up()
        await cluster.until(lambda: not cluster.gateway.monitor.ready(Role.PREFILL))
        return stub.give_back()

    d0.answer = give_back_once_p_is_gone
    status, _ = await cluster.complete()
    assert (status, kinds(p0), kinds(d0), p0.redispatched) == (200, ["prefill"], ["decode"] * 2, [])


async def test_the_third_decode_instance_keeps_the_request(cluster):
    p0, d0 = cluster.instances["p0"], cluster.instances["d0"]
    d1 = await cluster.add("d1", Role.DECODE, num_to_relinquish=9)
    d0.num_to_relinquish = 9
    status, _ = await cluster.complete()
    assert (status, kinds(p0)) == (200, ["prefill"])
    assert (may_be_given_back(d0), may_be_given_back(d1)) == ([True, False], [True])
    assert [body["exclude"] for body in p0.redispatched] == [["d0"], ["d1"]]
    assert await relinquished(cluster) == {"d0": 1.0, "d1": 1.0}


async def test_instances_that_give_back_what_they_must_keep_end_in_429(cluster):
    async def give_back(stub, request, leg):
        return stub.give_back()

    d0 = cluster.instances["d0"]
    d0.answer = give_back
    async with cluster.http.post("/v1/completions", json={"prompt": "hi"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == 429
    assert "3 decode instances had no room" in error["message"]
    assert may_be_given_back(d0) == [True, True, False]
    assert cluster.record().outcome is Outcome.REJECTED
    assert await relinquished(cluster) == {"d0": 3.0}


async def test_an_instance_that_failed_the_request_is_not_bound_again(cluster):
    """d0 fails, the second try is prefilled anew and given back by d1: P is told of both."""
    p0, d0 = cluster.instances["p0"], cluster.instances["d0"]
    d1 = await cluster.add("d1", Role.DECODE, num_to_relinquish=1)

    async def fail(stub, request, leg):
        return web.json_response({"error": {"message": "engine is gone"}}, status=503)

    async def dispatch(stub, request, leg):
        target = d0 if len(stub.legs) == 1 else d1
        return await stub.prefill(leg, decode_id=target.instance_id, decode_url=target.url)

    d0.answer, p0.answer = fail, dispatch
    assert (await cluster.complete())[0] == 200
    (told,) = {leg.body["kv_transfer_params"]["tetri"]["queued_since_s"] for leg in (*d0.legs, *d1.legs)}
    assert told <= cluster.record().prefill_end_s, "also of both tries"
    assert [body["exclude"] for body in p0.redispatched] == [["d1", "d0"]]
    assert (kinds(d0), kinds(d1), await relinquished(cluster)) == (["decode"], ["decode"] * 2, {"d1": 1.0})


@pytest.mark.parametrize(
    ("overloaded", "body"),
    [("p0", {}), ("d0", {}), ("d0", {"stream": True}), ("d0", {"n": 2}), ("p0", {"max_tokens": 1})],
)
async def test_an_instances_429_is_passed_on_and_not_tried_elsewhere(cluster, overloaded, body):
    async def refuse(stub, request, leg):
        return web.json_response(OVERLOADED, status=429, headers={"Retry-After": "7"})

    stub = cluster.instances[overloaded]
    stub.answer = refuse
    other = await cluster.add(overloaded[0] + "1", stub.role)
    other.load = dataclasses.replace(other.load, num_running=50, num_waiting_prompt_tokens=9999)
    await cluster.until(lambda: any(load.num_running == 50 for load in cluster.gateway.monitor.loads()))
    async with cluster.http.post("/v1/completions", json={"prompt": "hi", **body}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")
        assert await response.json() == OVERLOADED
    assert (len(stub.legs), other.legs) == (1, [])
    assert cluster.record().outcome is Outcome.REJECTED and "waited 60 s" in cluster.record().error


async def test_what_can_never_fit_is_400_and_names_max_tokens(cluster):
    async def refuse(stub, request, leg):
        error = "7 prompt tokens and up to 9000 output tokens fit no decode instance's KV cache"
        return await stub.prefill(leg, decode_id=None, decode_url=None, error=error, can_ever_fit=False)

    cluster.instances["p0"].answer = refuse
    status, answer = await cluster.complete(max_tokens=9000)
    message = "7 prompt tokens and up to 9000 output tokens fit no decode instance's KV cache"
    assert status == 400
    assert answer == {"error": {"message": message, "type": "BadRequestError", "param": "max_tokens", "code": 400}}
    assert (kinds(cluster.instances["p0"]), cluster.instances["d0"].legs) == (["prefill"], [])
    assert cluster.record().outcome is Outcome.REJECTED


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"max_tokens": 1}])
async def test_clients_cannot_say_what_only_gateways_may_in_headers(cluster, body):
    p0, d0 = cluster.instances["p0"], cluster.instances["d0"]
    d0.num_to_relinquish = 9
    forged = {RELINQUISH_HEADER: "1", LEG_HEADER: "decode"}
    status, _ = await cluster.complete(headers=forged, **body)
    assert status == 200
    assert kinds(p0) + kinds(d0) == (["prefill"] + ["decode"] * 3 if body == {} else ["whole"])
    carrying = [leg.kind for leg in (*p0.legs, *d0.legs) if RELINQUISH_HEADER in leg.headers]
    assert carrying == (["decode"] * 2 if body == {} else []), "the gateway's own, and never on the last one"


@pytest.mark.parametrize(
    ("path", "data", "status", "param", "words"),
    [
        ("/v1/completions", b"{", 400, None, "not valid JSON"),
        ("/v1/completions", b"\xff\xfe", 400, None, "not valid JSON"),
        ("/v1/completions", b"[" * 200_000, 400, None, "not valid JSON"),
        ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, None, "NaN"),
        ("/v1/completions", b'["prompt"]', 400, None, "a JSON list, needs an object"),
        ("/v1/completions", b'{"model": "m"}', 400, "prompt", "prompt is missing"),
        ("/v1/chat/completions", b'{"prompt": "x"}', 400, "messages", "messages is missing"),
        ("/v1/completions", b'{"prompt": "x", "model": 3}', 400, "model", "needs a string"),
        ("/v1/completions", b'{"prompt": "x", "model": "gpt"}', 404, "model", "The model `gpt` does not exist."),
        ("/v1/completions", b'"' + b"x" * 5000, 413, None, "Too Large"),
        ("/v1/embeddings", b"{}", 404, None, "Not Found"),
    ],
)
async def test_bad_requests_have_vllms_error_shape(path, data, status, param, words, bare):
    await bare.stop()
    await bare.start(max_body_bytes=201_000 if data[:2] == b"[[" else 4000)
    bare.instances.clear()
    await bare.add("p0", Role.PREFILL)
    async with bare.http.post(path, data=data) as response:
        error = (await response.json())["error"]
        assert response.status == status
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (status, param)
    assert words in error["message"] and "\n" not in error["message"]
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError", 413: error["type"]}[status]
    assert bare.instances["p0"].legs == []


async def test_an_unexpected_failure_is_a_500_and_the_gateway_goes_on(cluster, monkeypatch, caplog):
    monkeypatch.setattr(cluster.gateway._handler, "_place", lambda *a: 1 / 0)
    status, answer = await cluster.complete()
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    assert "ZeroDivisionError" in caplog.text and "ZeroDivision" not in answer["error"]["message"]
    assert (await cluster.http.get("/tetri/status")).status == 200


async def test_over_the_bound_of_open_requests_is_429(bare):
    await bare.stop()
    await bare.start(max_open_requests=1)

    async def slow(stub, request, leg):
        await asyncio.sleep(30)

    p0 = await bare.add("p0", Role.PREFILL, answer=slow)
    first = asyncio.create_task(bare.complete())
    await bare.until(lambda: p0.legs)
    async with bare.http.post("/v1/completions", json={"prompt": "hi"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert "max_open_requests" in (await response.json())["error"]["message"]
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_request_id_that_instances_would_read_differently_is_refused(cluster):
    status, answer = await cluster.complete(headers={"X-Request-Id": "é1"})
    assert status == 400 and "ASCII" in answer["error"]["message"]


async def test_every_p_over_its_pinned_budget_is_429_after_a_bounded_wait(bare):
    await bare.stop()
    await bare.start(place_wait_s=0.1)
    p0 = await bare.add("p0", Role.PREFILL)
    await bare.add("d0", Role.DECODE)
    p0.load = make_load("p0", is_over_pinned_budget=True, sequence=p0.load.sequence)
    await bare.until(lambda: bare.gateway.monitor.loads(Role.PREFILL)[0].is_over_pinned_budget)
    assert (await bare.complete())[0] == 429
    assert (await bare.complete(max_tokens=1))[0] == 200, "nobody pulls its KV cache"
    waiting = asyncio.create_task(bare.complete())
    p0.load = dataclasses.replace(p0.load, is_over_pinned_budget=False)
    assert (await waiting)[0] == 200


async def test_a_leg_over_the_request_timeout_is_504_and_not_sent_again(bare):
    await bare.stop()
    await bare.start(request_timeout_s=0.2)

    async def slow(stub, request, leg):
        await asyncio.sleep(30)

    p0 = await bare.add("p0", Role.PREFILL, answer=slow)
    p1 = await bare.add("p1", Role.PREFILL, answer=slow)
    status, answer = await bare.complete()
    assert (status, len(p0.legs) + len(p1.legs)) == (504, 1)
    assert "request_timeout_s" in answer["error"]["message"]


async def test_requests_go_to_the_least_loaded(cluster):
    await cluster.add("p1", Role.PREFILL)
    await asyncio.gather(*(cluster.complete(prompt=[1] * 100) for _ in range(4)))
    assert {len(cluster.instances[i].legs) for i in ("p0", "p1")} <= {1, 2, 3}
    busy = cluster.instances["p0"]
    busy.load = dataclasses.replace(busy.load, num_waiting_prompt_tokens=10_000)
    await cluster.until(lambda: cluster.gateway.monitor.loads()[1].num_waiting_prompt_tokens == 10_000)
    before = len(busy.legs)
    await cluster.complete()
    assert len(busy.legs) == before


async def test_health_follows_the_instances(bare):
    async def health():
        async with bare.http.get("/health") as response:
            return response.status, (await response.json()).get("missing")

    assert await health() == (503, ["prefill", "decode"])
    assert (await bare.complete())[0] == 503
    await bare.add("p0", Role.PREFILL)
    assert await health() == (503, ["decode"])
    d0 = await bare.add("d0", Role.DECODE)
    assert await health() == (200, None)
    d0.load = dataclasses.replace(d0.load, state=InstanceState.DRAINING)
    await bare.until(lambda: not bare.gateway.monitor.ready(Role.DECODE))
    assert await health() == (503, ["decode"])
    d0.load = dataclasses.replace(d0.load, state=InstanceState.READY)
    await bare.until(lambda: bare.gateway.monitor.ready(Role.DECODE))
    await d0.hang_up()
    await bare.until(lambda: not bare.gateway.monitor.ready(Role.DECODE), timeout_s=1)
    assert await health() == (503, ["decode"])
    status = await (await bare.http.get("/tetri/status")).json()
    assert [hello["instance_id"] for hello in status["lost"]] == ["d0"]


async def test_a_flipped_role_counts_from_the_report(cluster):
    d0 = cluster.instances["d0"]
    d0.load = dataclasses.replace(d0.load, role=Role.PREFILL, role_epoch=1)
    await cluster.until(lambda: len(cluster.gateway.monitor.ready(Role.PREFILL)) == 2)
    assert (await cluster.http.get("/health")).status == 503


async def test_agents_get_broadcasts_of_everyone(cluster):
    p0, d0 = cluster.instances["p0"], cluster.instances["d0"]
    await cluster.until(lambda: p0.broadcasts and len(getattr(p0.broadcasts[-1], "loads", ())) == 2)
    assert p0.broadcasts[0].gateway_id == "gateway"
    assert p0.broadcasts[-1].urls == {"p0": p0.url, "d0": d0.url}


async def test_broadcasts_tell_recent_lengths_and_transfers_are_recorded(cluster):
    d0 = cluster.instances["d0"]
    await cluster.complete(headers={"X-Request-Id": "r"})
    await cluster.until(lambda: getattr(d0.broadcasts[-1], "recent_lengths_tokens", None) == (3,))
    d0.transfers += [TransferReport("r", 1.0, 2.0, 7), TransferReport("somebody else's", 1.0, 2.0, 0)]
    await cluster.until(lambda: cluster.record().transfer_end_s == 2.0)
    text = await (await cluster.http.get("/metrics")).text()
    assert 'tetri_kv_transfers_total{result="pulled"} 1.0' in text and "recomputed" not in text


async def test_an_instance_with_another_kv_layout_is_refused(cluster):
    """Block sizes 16 and 32 that both report healthy would give garbage."""
    from stub_instance import StubInstance

    odd = StubInstance("d1", Role.DECODE, cluster.instances, kv_fingerprint="other")
    await odd.start()
    await odd.dial(cluster.url)
    await cluster.until(lambda: odd.close_reason == "1008")
    assert [load.id for load in cluster.gateway.monitor.loads()] == ["d0", "p0"]


@pytest.mark.parametrize("text", ["nonsense", '{"type":"welcome","version":2,"body":{"gateway_id":"g"}}'])
async def test_an_agent_that_speaks_nonsense_is_refused(bare, text):
    async with bare.http.ws_connect("/tetri/agent") as socket:
        await socket.send_str(text)
        message = await socket.receive(timeout=5)
        assert (message.type, socket.close_code) == (aiohttp.WSMsgType.CLOSE, 1008)
        assert message.extra
    assert bare.gateway.monitor.instances() == []


async def test_models_are_the_instances_own_cards(cluster):
    models = await (await cluster.http.get("/v1/models")).json()
    assert models == {"object": "list", "data": [{"id": "m", "max_model_len": 2048}]}


async def test_models_without_an_answer_are_still_listed(cluster):
    for stub in cluster.instances.values():
        await stub._runner.cleanup()
    models = await (await cluster.http.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == ["m"]


async def test_status_and_requests_are_json(cluster):
    for i in range(3):
        await cluster.complete(headers={"X-Request-Id": f"r{i}"})
    status = await (await cluster.http.get("/tetri/status")).json()
    assert [i["id"] for i in status["instances"]] == ["d0", "p0"]
    p0 = status["instances"][1]
    assert (p0["role"], p0["state"], p0["predictor"], p0["role_epoch"]) == ("prefill", "ready", "length-predictor/3", 0)
    assert p0["load"]["num_total_blocks"] == 100 and p0["report_age_s"] < 5
    requests = await (await cluster.http.get("/tetri/requests?limit=2")).json()
    assert [r["id"] for r in requests["requests"]] == ["r1", "r2"]
    assert requests["requests"][1]["length_range"] == {"low_tokens": 0, "high_tokens": 200}
    async with cluster.http.get("/tetri/requests?limit=-1") as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "limit")


async def test_metrics_tell_requests_legs_and_loads(cluster):
    await cluster.complete()
    async with cluster.http.post("/v1/completions", json={"prompt": "hi", "stream": True}) as response:
        await response.read()
    await cluster.complete(model="gpt")
    text = await (await cluster.http.get("/metrics")).text()
    for line in (
        'tetri_requests_total{outcome="ok"} 2.0',
        'tetri_requests_total{outcome="rejected"} 1.0',
        'tetri_legs_total{instance="p0",leg="prefill"} 2.0',
        'tetri_legs_total{instance="d0",leg="decode"} 2.0',
        'tetri_instances{role="prefill",state="ready"} 1.0',
        'tetri_instance_free_blocks{instance="d0",role="decode"} 100.0',
        'tetri_predictor_info{instance="p0",version="length-predictor/3"} 1.0',
        "tetri_ttft_seconds_count 1.0",
        "tetri_jct_seconds_count 2.0",
        "tetri_output_tokens_total 6.0",
        "tetri_open_requests 0.0",
    ):
        assert line in text, line
    assert all(line.startswith(("#", "tetri_")) for line in text.splitlines())


async def test_a_gateway_that_stops_says_goodbye_to_its_agents(cluster):
    p0 = cluster.instances["p0"]
    await cluster.runner.cleanup()
    await cluster.until(lambda: p0.close_reason == "1001")
