"""A client's request on its way through the gateway: placed, split in two legs or run whole, recorded.

No policy lives here: `core.place` places, P's dispatcher chooses D, `core.bypass` says what runs whole. Retries live
here and in `LegClient.post`, bounded by `_MAX_TRIES` and only while nothing reached the client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from aiohttp import web

from serving_plugin.control.forecasts import ForecastMonitor
from serving_plugin.control.http_errors import error_body
from serving_plugin.control.legs import (
    Body,
    LegClient,
    LegFailedError,
    PrefillAnswer,
    client_max_tokens,
    decode_body,
    estimate_prompt_tokens,
    parse_prefill_answer,
    prefill_body,
    strip_client_body,
    unchecked_field,
)
from serving_plugin.control.metrics import GatewayMetrics
from serving_plugin.control.monitor import Monitor
from serving_plugin.control.request_table import Phase, RequestTable, Row
from serving_plugin.control.settings import GatewaySettings
from serving_plugin.control.sse import EventMeter
from serving_plugin.core.bypass import BypassPolicy, whole_reason
from serving_plugin.core.errors import (
    BadRequestError,
    ModelNotFoundError,
    NoInstanceError,
    OverloadedError,
    TetriError,
)
from serving_plugin.core.place import PlacePolicy
from serving_plugin.core.types import InstanceLoad, Outcome, RequestInfo, Role
from serving_plugin.wire import DISPATCH_PATH, RELINQUISH_HEADER, REQUEST_ID_HEADER, Leg

logger = logging.getLogger(__name__)

_MAX_TRIES = 2
_MAX_BINDINGS = 3  # decode instances that a request is sent to in turn, as those before had no room
_PLACE_POLL_S = 0.05
_MAX_ID_CHARS = 256
_FORWARDED_HEADERS = ("Authorization", "traceparent", "tracestate")


class _RelinquishedError(Exception):
    """A decode instance gave the request back before anything was pulled: its KV cache is still on P."""


class _ClientGoneError(Exception):
    """The client closed its connection while we wrote to it."""


@dataclass(slots=True)
class _Job:
    """One request as the handler sees it. `asked`: role of the instance it is at; `lost`: instances that failed it.

    `queued_since_s`: unix seconds of its first decode leg.
    """

    http: web.Request
    row: Row
    body: Body
    is_chat: bool
    info: RequestInfo
    model: str | None
    asked: Role = Role.PREFILL
    num_tries: int = 0
    lost: set[str] = field(default_factory=set)
    outcome: Outcome = Outcome.OK
    may_relinquish: bool = False
    queued_since_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {name: self.http.headers[name] for name in _FORWARDED_HEADERS if name in self.http.headers}


class RequestHandler:
    """Serves `/v1/completions` and `/v1/chat/completions`."""

    def __init__(
        self,
        settings: GatewaySettings,
        monitor: Monitor,
        table: RequestTable,
        metrics: GatewayMetrics,
        forecasts: ForecastMonitor,
        client: LegClient,
        place: PlacePolicy,
        bypass: BypassPolicy,
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._table = table
        self._metrics = metrics
        self._forecasts = forecasts
        self._client = client
        self._place = place
        self._bypass = bypass

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._handle(http, is_chat=False)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._handle(http, is_chat=True)

    async def _handle(self, http: web.Request, is_chat: bool) -> web.StreamResponse:
        """Open a row, serve, and close the row however it ends."""
        if len(self._table) >= self._settings.max_open_requests:
            raise OverloadedError(
                f"{len(self._table)} requests are open, limit {self._settings.max_open_requests} (max_open_requests)"
            )
        row = self._table.open(_client_id(http), time.time())
        outcome = Outcome.ERROR
        try:
            job = await self._read(http, row, is_chat)
            response = await self._serve(job)
            outcome = job.outcome
            return response
        except (asyncio.CancelledError, _ClientGoneError) as error:
            outcome, row.error = Outcome.CANCELLED, "the client closed its connection"
            if isinstance(error, _ClientGoneError):
                return web.Response(status=499)  # nobody reads it
            raise
        except (BadRequestError, OverloadedError, NoInstanceError) as error:
            outcome, row.error = Outcome.REJECTED, str(error)
            raise
        except TetriError as error:
            row.error = str(error)
            logger.warning("%s: %s", row.id, error)
            raise
        finally:
            record = self._table.close(row, outcome)
            self._metrics.observe(record)
            if record.outcome is Outcome.OK and record.num_output_tokens > 0:
                self._forecasts.observe(row.summaries, record.num_output_tokens)

    async def _read(self, http: web.Request, row: Row, is_chat: bool) -> _Job:
        """Check the little that a gateway must know of a body; vLLM checks the rest."""
        body = strip_client_body(await _read_object(http))
        needed = ("messages",) if is_chat else ("prompt", "prompt_embeds")
        if all(body.get(name) is None for name in needed):
            raise BadRequestError(f"{needed[0]} is missing", param=needed[0])
        model = body.get("model") or None
        if model is not None and not isinstance(model, str):
            raise BadRequestError(f"model is a {type(model).__name__}, needs a string", param="model")
        models = self._monitor.models()
        if not models:
            raise NoInstanceError("no instance is connected yet: wait, or look at the instances' logs")
        if model is not None and model not in models:
            raise ModelNotFoundError(
                f"The model `{model}` does not exist. Valid aliases: {', '.join(models)}.", param="model"
            )
        row.num_prompt_tokens = estimate_prompt_tokens(body, is_chat)
        limit = client_max_tokens(body, is_chat) if unchecked_field(body) is None else None
        info = RequestInfo(row.id, row.arrival_s, row.num_prompt_tokens, limit or 0)
        return _Job(http, row, body, is_chat, info, model)

    async def _serve(self, job: _Job) -> web.StreamResponse:
        """Split or whole, and once more on another instance if one is lost before anything reached the client."""
        row = job.row
        row.whole_reason = unchecked_field(job.body) or whole_reason(job.body, job.is_chat)
        if row.whole_reason is None and self._bypass(job.info, self._monitor.loads(model=job.model)):
            row.whole_reason = "bypass"
        while True:
            job.num_tries += 1
            try:
                return await (self._split(job) if row.whole_reason is None else self._whole(job))
            except LegFailedError as error:
                job.lost.add(error.instance_id)
                if not self._another(job):
                    raise
                logger.info("%s: tried again without %s: %s", row.id, error.instance_id, error)
                self._metrics.count_retry(job.asked.value)

    def _another(self, job: _Job) -> bool:
        """Whether the request may be tried again: not over the bound, nothing sent, and another instance there."""
        untouched = job.row.first_token_s is None
        return untouched and job.num_tries < _MAX_TRIES and bool(self._monitor.ready(job.asked, job.model, job.lost))

    async def _split(self, job: _Job) -> web.StreamResponse:
        """Prefill leg, then the decode leg where P's dispatcher says."""
        row = job.row
        prefill_id = await self._choose_prefill(job)
        row.phase, row.prefill_instance, row.prefill_start_s = Phase.PREFILL, prefill_id, time.time()
        body = prefill_body(job.body, job.is_chat, row.id, row.arrival_s, job.lost)
        async with self._leg(job, prefill_id, Leg.PREFILL, body) as answer:
            raw = await answer.read()
            if answer.status != 200:
                return self._pass_error(job, answer, raw, prefill_id)
        row.prefill_end_s = time.time()
        prefilled = parse_prefill_answer(raw, prefill_id)
        _record_prefill(row, prefilled)
        # a length that the client forces says nothing of a forecast
        if not job.body.get("ignore_eos") and not job.body.get("min_tokens"):
            row.summaries = self._forecasts.read(prefilled.summaries, row.id)
        if not prefilled.can_ever_fit:
            raise BadRequestError(prefilled.error or "the request fits no decode instance", param="max_tokens")
        if prefilled.decode_url is None or prefilled.decode_id is None:
            raise NoInstanceError(f"no decode instance takes the request: {prefilled.error or 'none is ready'}")
        return await self._decode(job, prefill_id, prefilled, prefilled.decode_id, prefilled.decode_url)

    async def _decode(
        self, job: _Job, prefill_id: str, prefilled: PrefillAnswer, decode_id: str, decode_url: str
    ) -> web.StreamResponse:
        """The decode leg where P's dispatcher said; bound elsewhere, a bounded number of times, if D gives it back."""
        job.queued_since_s = job.queued_since_s or time.time()
        body = decode_body(job.body, prefilled.kv_transfer_params, job.queued_since_s)
        job.asked = Role.DECODE
        for num_left in reversed(range(_MAX_BINDINGS)):
            job.row.phase, job.row.decode_instance = Phase.DECODE, decode_id
            job.may_relinquish = num_left > 0
            try:
                return await self._answer(job, decode_id, decode_url, Leg.DECODE, body)
            except _RelinquishedError:
                self._metrics.count_relinquished(decode_id)
                decode_id, decode_url = await self._bind_elsewhere(job, prefill_id, prefilled, decode_id, decode_url)
        raise OverloadedError(f"{_MAX_BINDINGS} decode instances had no room for the request: send again later")

    async def _bind_elsewhere(
        self, job: _Job, prefill_id: str, prefilled: PrefillAnswer, decode_id: str, decode_url: str
    ) -> tuple[str, str]:
        """Ask P's dispatcher for another decode instance; the same one, if it knows none or does not answer."""
        body = {"tetri": prefilled.kv_transfer_params["tetri"], "exclude": [decode_id, *job.lost]}
        try:
            url = self._url(prefill_id).rstrip("/") + DISPATCH_PATH
            answer = await self._client.post_json(url, body, job.headers, self._settings.connect_timeout_s)
            found = str(answer["decode_id"]), str(answer["decode_url"])
            if answer["decode_id"] is not None:
                logger.info("%s: bound to %s instead of %s, which has no room", job.row.id, found[0], decode_id)
                return found
        except (LegFailedError, aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s: %s names no other decode instance (%r)", job.row.id, prefill_id, error)
        return decode_id, decode_url

    async def _whole(self, job: _Job) -> web.StreamResponse:
        """The client's request, unchanged, on the one instance whose role it needs most."""
        row = job.row
        if job.info.max_tokens == 1:  # prefill is all there is
            instance_id = await self._choose_prefill(job, is_pulled=False)
        else:
            job.asked = Role.DECODE
            loads = self._monitor.ready(Role.DECODE, job.model, job.lost)
            if not loads:
                raise self._nobody(Role.DECODE, job)
            instance_id = min(loads, key=_decode_load).id
        row.phase, row.prefill_instance, row.decode_instance = Phase.WHOLE, instance_id, instance_id
        row.prefill_start_s = time.time()
        return await self._answer(job, instance_id, self._url(instance_id), Leg.WHOLE, job.body)

    async def _choose_prefill(self, job: _Job, is_pulled: bool = True) -> str:
        """Place on a prefill instance; wait a bounded time while all are over their pinned budget.

        A request whose KV cache nobody will pull pins nothing: the budget is no matter to it.
        """
        job.asked = Role.PREFILL
        deadline_s = time.monotonic() + self._settings.place_wait_s
        while True:
            loads = self._monitor.ready(Role.PREFILL, job.model, job.lost)
            if not loads:
                raise self._nobody(Role.PREFILL, job)
            if not is_pulled:
                loads = [replace(load, is_over_pinned_budget=False) for load in loads]
            chosen = self._place(job.info, loads, self._monitor.sent_tokens())
            if chosen is not None:
                self._monitor.add_sent_tokens(chosen, job.info.num_prompt_tokens)
                return chosen
            if time.monotonic() > deadline_s:
                raise OverloadedError(
                    f"every prefill instance holds too much KV cache for decode instances "
                    f"(waited {self._settings.place_wait_s:g} s, place_wait_s): send again later"
                )
            await asyncio.sleep(_PLACE_POLL_S)

    def _nobody(self, role: Role, job: _Job) -> NoInstanceError:
        what = f" of model {job.model}" if job.model else ""
        return NoInstanceError(f"no {role} instance{what} is ready: see /tetri/status")

    def _url(self, instance_id: str) -> str:
        url = self._monitor.url(instance_id)
        if url is None:
            raise LegFailedError(f"instance {instance_id} left", instance_id)
        return url

    def _leg(
        self, job: _Job, instance_id: str, leg: Leg, body: Body, base_url: str | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        self._metrics.count_leg(leg.value, instance_id)
        url = (base_url or self._url(instance_id)).rstrip("/") + job.http.path
        headers = job.headers | ({RELINQUISH_HEADER: "1"} if leg is Leg.DECODE and job.may_relinquish else {})
        return self._client.post(instance_id, url, body, leg, job.row.id, headers)

    async def _answer(self, job: _Job, instance_id: str, base_url: str, leg: Leg, body: Body) -> web.StreamResponse:
        """Send the leg whose tokens the client gets, and pass them on."""
        async with self._leg(job, instance_id, leg, body, base_url) as answer:
            if answer.status == 503 and RELINQUISH_HEADER in answer.headers:
                raise _RelinquishedError(instance_id)
            if answer.status != 200:
                return self._pass_error(job, answer, await answer.read(), instance_id)
            if answer.content_type == "text/event-stream":
                return await self._stream(job, answer)
            raw = await answer.read()
        job.row.last_token_s = time.time()
        return web.Response(
            body=_finish_json(job.row, raw),
            content_type="application/json",
            headers={REQUEST_ID_HEADER: job.row.id},
        )

    async def _stream(self, job: _Job, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass events on as they come. An instance lost under way becomes an error event, as vLLM sends them."""
        row, meter = job.row, EventMeter()
        response = web.StreamResponse(
            headers={"Content-Type": answer.headers["Content-Type"], REQUEST_ID_HEADER: row.id}
        )
        try:
            async for chunk in answer.content.iter_any():
                if events := meter.feed(chunk):
                    row.last_token_s = time.time()
                    if row.first_token_s is None:
                        row.first_token_s = row.last_token_s
                    await _write(job.http, response, events)
            lost = None if meter.done or meter.error else "the stream ended early"
        except aiohttp.ClientError as error:
            lost = str(error) or type(error).__name__
        except TimeoutError:
            if row.first_token_s is None:
                raise
            lost = f"over {self._settings.request_timeout_s:.0f} s (request_timeout_s)"
        _record_stream(row, meter)
        if lost is not None and row.first_token_s is None:
            raise LegFailedError(f"decode instance {row.decode_instance} was lost: {lost}", row.decode_instance or "")
        if lost is not None:
            await self._end_broken_stream(job, response, lost)
        elif meter.error is not None:
            job.outcome, row.error = Outcome.ERROR, meter.error
        if lost is None:
            await _write(job.http, response, meter.rest())
        await response.write_eof()
        return response

    async def _end_broken_stream(self, job: _Job, response: web.StreamResponse, reason: str) -> None:
        row = job.row
        row.error = f"decode instance {row.decode_instance} was lost under the stream: {reason}"
        job.outcome = Outcome.ERROR
        logger.warning("%s: %s", row.id, row.error)
        event = json.dumps(error_body(row.error, "BadGatewayError", None, 502))
        await _write(job.http, response, f"data: {event}\n\ndata: [DONE]\n\n".encode())

    def _pass_error(self, job: _Job, answer: aiohttp.ClientResponse, raw: bytes, instance_id: str) -> web.Response:
        """An instance's own error, unchanged; a 503 (draining, or its engine is gone) is tried elsewhere first."""
        row = job.row
        row.error = f"{instance_id} answered {answer.status}: {raw[:500].decode(errors='replace')}"
        if answer.status == 503:
            job.lost.add(instance_id)
            if self._another(job):
                raise LegFailedError(row.error, instance_id)
        job.outcome = Outcome.REJECTED if answer.status < 500 else Outcome.ERROR
        return web.Response(
            status=answer.status,
            body=raw,
            headers={
                "Content-Type": answer.headers.get("Content-Type", "application/json"),
                REQUEST_ID_HEADER: row.id,
                **{name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers},
            },
        )


async def _read_object(http: web.Request) -> Body:
    raw = await http.read()
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError(f"the body is a JSON {type(body).__name__}, needs an object")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _client_id(http: web.Request) -> str | None:
    client_id = http.headers.get(REQUEST_ID_HEADER)
    if client_id is not None and not (
        len(client_id) <= _MAX_ID_CHARS and client_id.isascii() and client_id.isprintable()
    ):
        raise BadRequestError(f"{REQUEST_ID_HEADER} must be at most {_MAX_ID_CHARS} printable ASCII characters")
    return client_id or None


async def _write(http: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Send bytes to the client, headers first if need be."""
    try:
        if not response.prepared:
            await response.prepare(http)
        await response.write(data)
    except ConnectionError:
        raise _ClientGoneError from None


def _decode_load(load: InstanceLoad) -> tuple[int, int, str]:
    """Least requests first, then most free blocks, then id."""
    return (load.num_active + load.num_waiting, -load.num_free_blocks, load.id)


def _record_prefill(row: Row, prefilled: PrefillAnswer) -> None:
    times_s = prefilled.times_s
    row.prefill_start_s = times_s.get("prefill_start_s", row.prefill_start_s)
    row.prefill_end_s = times_s.get("prefill_end_s", row.prefill_end_s)
    row.forecast_ready_s = times_s.get("forecast_ready_s")
    row.dispatch_s = times_s.get("dispatch_s")
    row.length_range = prefilled.length_range
    if prefilled.num_prompt_tokens is not None:
        row.num_prompt_tokens = prefilled.num_prompt_tokens


def _record_stream(row: Row, meter: EventMeter) -> None:
    row.num_output_tokens = meter.num_output_tokens
    if meter.num_prompt_tokens is not None:
        row.num_prompt_tokens = meter.num_prompt_tokens


def _finish_json(row: Row, raw: bytes) -> bytes:
    """Record usage, and hide where the KV cache was: plain vLLM answers `kv_transfer_params: null`."""
    try:
        answer: Any = json.loads(raw)
        usage = answer.get("usage") or {}
    except (ValueError, AttributeError):
        return raw  # whatever it is, it is the instance's answer
    row.num_output_tokens = usage.get("completion_tokens") or 0
    row.num_prompt_tokens = usage.get("prompt_tokens") or row.num_prompt_tokens
    if answer.get("kv_transfer_params") is None:
        return raw
    answer["kv_transfer_params"] = None
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
